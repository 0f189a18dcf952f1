"""Reports as files: Markdown, figures, and a page that opens from disk. Nothing is measured or computed anew here."""
