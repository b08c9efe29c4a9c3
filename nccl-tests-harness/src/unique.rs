//! Lists without repeated values.

/// Removes repeated values. The first of equal values stays, and the order does not change.
pub(crate) fn unique<T: PartialEq>(values: Vec<T>) -> Vec<T> {
    let mut kept = Vec::new();
    for value in values {
        if !kept.contains(&value) {
            kept.push(value);
        }
    }
    kept
}
