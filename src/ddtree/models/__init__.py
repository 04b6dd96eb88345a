"""Target decoders and the DFlash drafter, read from Hugging Face folders."""
