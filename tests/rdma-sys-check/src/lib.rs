//! Nothing here: the comparison is in `tests/`.
