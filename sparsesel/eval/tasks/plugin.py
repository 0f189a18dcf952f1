"""Entry point: which tasks there are. Imports neither torch nor the tasks."""

from sparsesel.hookspecs import TaskPlugin, hookimpl


@hookimpl
def sparsesel_tasks() -> list[TaskPlugin]:
    """The tasks of this package."""
    return [
        TaskPlugin(
            name="perplexity",
            summary="Perplexity of the last tokens of long documents, every one of them decoded through the selector.",
            config="sparsesel.eval.tasks.perplexity:PerplexityConfig",
            factory="sparsesel.eval.tasks.perplexity:Perplexity",
        ),
        TaskPlugin(
            name="niah",
            summary="Numbers hidden in a long text and asked for at its end: one, one of four, four of one name.",
            config="sparsesel.eval.tasks.niah:NiahConfig",
            factory="sparsesel.eval.tasks.niah:Niah",
            paper="Parameters of RULER: What's the Real Context Size of Your Long-Context Language Models? "
            "arXiv 2404.06654",
        ),
        TaskPlugin(
            name="longbench",
            summary="Questions about long texts: F1 of the answers on 2WikiMQA, HotpotQA and MultiFieldQA-en.",
            config="sparsesel.eval.tasks.longbench:LongBenchConfig",
            factory="sparsesel.eval.tasks.longbench:LongBench",
            paper="LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding. arXiv 2308.14508",
        ),
        TaskPlugin(
            name="lm-eval",
            summary="Generation tasks of lm-evaluation-harness, with its prompts, data and metrics.",
            config="sparsesel.eval.tasks.lm_eval:LmEvalConfig",
            factory="sparsesel.eval.tasks.lm_eval:LmEval",
        ),
        TaskPlugin(
            name="fidelity",
            summary="Every step of every layer and head beside exact top-K and full attention of the same query.",
            config="sparsesel.eval.tasks.fidelity:FidelityConfig",
            factory="sparsesel.eval.tasks.fidelity:Fidelity",
            paper="Figure 5 of Recall Before You Rank, arXiv 2607.27692",
        ),
        TaskPlugin(
            name="reuse-study",
            summary="How much the exact supports of similar queries overlap, and what recalling R of them covers.",
            config="sparsesel.eval.tasks.reuse_study:ReuseStudyConfig",
            factory="sparsesel.eval.tasks.reuse_study:ReuseStudy",
            paper="Figures 2 and 3 of Recall Before You Rank, arXiv 2607.27692",
        ),
        TaskPlugin(
            name="stability",
            summary="Whether perplexity and choices drift from those of exact top-K over many decoded tokens.",
            config="sparsesel.eval.tasks.stability:StabilityConfig",
            factory="sparsesel.eval.tasks.stability:Stability",
            paper="Figure 8 of Recall Before You Rank, arXiv 2607.27692",
        ),
        TaskPlugin(
            name="sensitivity",
            summary="Perplexity while one field of a selector is varied at a time.",
            config="sparsesel.eval.tasks.sensitivity:SensitivityConfig",
            factory="sparsesel.eval.tasks.sensitivity:Sensitivity",
            paper="Recall Before You Rank, arXiv 2607.27692: sweeps of K, C, R, tau, Tr and W/C",
        ),
        TaskPlugin(
            name="ablation",
            summary="Perplexity of ReTopK with one of its parts taken away at a time.",
            config="sparsesel.eval.tasks.ablation:AblationConfig",
            factory="sparsesel.eval.tasks.ablation:Ablation",
            paper="Recall Before You Rank, arXiv 2607.27692, table 3",
        ),
        TaskPlugin(
            name="latency",
            summary="Time of one token's attention over all layers: random data, no model; stages, bytes, roofline.",
            config="sparsesel.eval.tasks.latency:LatencyConfig",
            factory="sparsesel.eval.tasks.latency:Latency",
            paper="Recall Before You Rank, arXiv 2607.27692, tables 1 and 4, figures 1 and 9",
        ),
        TaskPlugin(
            name="e2e",
            summary="Time of one token in the whole model against context, and its share outside attention.",
            config="sparsesel.eval.tasks.e2e:E2eConfig",
            factory="sparsesel.eval.tasks.e2e:E2e",
            paper="Recall Before You Rank, arXiv 2607.27692, table 5",
        ),
    ]
