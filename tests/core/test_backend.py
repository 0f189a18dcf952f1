"""Which backend runs: the one asked for, or the best one for the device, and never another."""

import threading

import pytest
import torch

from sparsesel.config import BackendName
from sparsesel.errors import InputError
from sparsesel.kv import KVView
from sparsesel.ops import backend, dense_attention
from sparsesel.ops.launch import recording

CPU, CUDA, META = (torch.device(kind) for kind in ("cpu", "cuda", "meta"))


@pytest.fixture
def machine(monkeypatch):
    """Sets whether triton is installed, and whether its interpreter is on."""

    def make(*, triton, interpreter):
        monkeypatch.setattr(backend, "_has_triton", lambda: triton)
        monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreter else "0")

    return make


def attention_inputs():
    return torch.randn(1, 4, 1, 16), KVView.dense(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))


@pytest.mark.parametrize("interpreter", [False, True])
@pytest.mark.parametrize("triton", [False, True])
def test_auto_is_triton_on_gpus_that_have_it_and_eager_elsewhere(machine, triton, interpreter):
    machine(triton=triton, interpreter=interpreter)
    assert backend.resolve("auto", CUDA) == ("triton" if triton else "eager")
    assert backend.resolve("auto", CPU) == "eager"  # the interpreter runs only what asks for it
    assert backend.resolve("auto", META) == "eager"


@pytest.mark.parametrize("device", [CPU, CUDA, META])
@pytest.mark.parametrize("triton", [False, True])
def test_eager_runs_anywhere(machine, triton, device):
    machine(triton=triton, interpreter=False)
    assert backend.resolve("eager", device) == "eager"


def test_triton_runs_where_its_kernels_can(machine):
    machine(triton=True, interpreter=False)
    assert backend.resolve("triton", CUDA) == "triton"
    assert backend.resolve("triton", META) == "triton"  # launches can be recorded there
    with pytest.raises(InputError, match=r"backend triton on cpu.*TRITON_INTERPRET"):
        backend.resolve("triton", CPU)
    machine(triton=True, interpreter=True)
    assert backend.resolve("triton", CPU) == "triton"
    machine(triton=False, interpreter=True)
    with pytest.raises(InputError, match="an installed triton"):
        backend.resolve("triton", CUDA)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(InputError, match=r"one of auto, triton, eager; got 'native'"):
        backend.resolve("native", CPU)


def test_what_is_available_says_why(machine):
    machine(triton=True, interpreter=True)
    assert [(one.name, one.available) for one in backend.available()] == [("triton", True), ("eager", True)]
    assert "interpreter" in backend.available()[0].why
    machine(triton=True, interpreter=False)
    triton, eager = backend.available()
    assert triton.available == torch.cuda.is_available()
    assert eager.available
    machine(triton=False, interpreter=False)
    assert backend.available()[0].why == "triton is not installed"


def test_the_backend_named_is_in_force_within_and_not_after():
    assert backend.current(CPU) == "eager"
    with backend.using("triton"):
        assert backend.current(CPU) == "triton"
        with backend.using("eager"):
            assert backend.current(CUDA) == "eager"
        assert backend.current(CPU) == "triton"
    with pytest.raises(KeyError), backend.using("triton"):
        raise KeyError
    assert backend.current(CPU) == "eager"


def test_another_thread_has_its_own():
    seen = []
    with backend.using("triton"):
        thread = threading.Thread(target=lambda: seen.append(backend.current(CPU)))
        thread.start()
        thread.join()
    assert seen == ["eager"]


@pytest.mark.parametrize("name", backend.NAMES)
def test_an_operation_is_run_by_the_backend_in_force(name: BackendName):
    query, kv = attention_inputs()
    with backend.using(name), recording() as launches:
        dense_attention(query, kv, scale=0.25)
    assert bool(launches) == (name == "triton")


def test_an_operation_is_refused_where_its_backend_cannot_run(machine):
    machine(triton=True, interpreter=False)
    query, kv = attention_inputs()
    with backend.using("triton"), pytest.raises(InputError, match="backend triton on cpu"):
        dense_attention(query, kv, scale=0.25)
