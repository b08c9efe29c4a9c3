//! Empty: the comparison is in `tests/`.
