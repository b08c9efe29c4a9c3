//! What findings and their cures are made of.

/// Where cures point to.
#[derive(Debug, Clone)]
pub struct Cures {
    /// The plugin's file.
    pub plugin: String,
    /// Whether NVLS is switched off by a variable, which some NCCL needs.
    pub nvls_is_off: bool,
    /// `NCCL_PROXY_CPUSET`, where it is set.
    pub proxy_cpus: Option<String>,
    /// `NCCL_SOCKET_IFNAME`, where it is set.
    pub socket_interfaces: Option<String>,
}

/// What has the same key, together: one finding for all of it.
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

/// The word for one, or the word for several.
pub(super) fn by_number<'a, T>(of: &[T], one: &'a str, several: &'a str) -> &'a str {
    if of.len() == 1 { one } else { several }
}

/// Names as a sentence lists them.
pub(super) fn list<S: AsRef<str>>(names: &[S]) -> String {
    nccl_net_spark::rails::list(names.iter().map(AsRef::as_ref))
}
