//! Parts of findings and their cures.

/// Facts for cures, beside those of the machine.
#[derive(Debug, Clone)]
pub struct Cures {
    /// The plugin's file.
    pub plugin: String,
    /// True where a variable switches NVLS off, which some NCCL needs.
    pub nvls_is_off: bool,
    /// `NCCL_PROXY_CPUSET`, if it is set.
    pub proxy_cpus: Option<String>,
    /// `NCCL_SOCKET_IFNAME`, if it is set.
    pub socket_interfaces: Option<String>,
}

/// Groups items by their key, for one finding for each group.
pub(super) fn alike<K: PartialEq, T>(items: impl IntoIterator<Item = (K, T)>) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for (key, item) in items {
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    groups
}

/// Returns the word for one item, or the word for several.
pub(super) fn by_number<'a, T>(of: &[T], one: &'a str, several: &'a str) -> &'a str {
    if of.len() == 1 { one } else { several }
}

/// Lists names in a sentence.
pub(super) fn list<S: AsRef<str>>(names: &[S]) -> String {
    nccl_net_spark::rails::list(names.iter().map(AsRef::as_ref))
}
