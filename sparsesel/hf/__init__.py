"""The one way into Hugging Face models."""
