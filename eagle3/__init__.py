"""eagle3 trains EAGLE-3 speculative-decoding drafters: prepare, extract, train, export, evaluate."""

__version__ = "0.1.0"
