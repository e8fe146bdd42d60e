"""Kit for tests of formats, encodings and storages; shipped for third parties."""
