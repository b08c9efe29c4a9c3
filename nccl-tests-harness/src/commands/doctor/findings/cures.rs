//! Facts and helpers for the texts of findings and cures.

/// Facts about the job that cures need.
#[derive(Debug, Clone)]
pub struct JobFacts {
    pub plugin: String,
    /// True if `NCCL_NVLS_ENABLE` is 0, which some NCCL versions need on Sparks.
    pub nvls_is_off: bool,
    pub proxy_cpus: Option<String>,
    pub socket_interfaces: Option<String>,
    /// Interfaces that `GLOO_SOCKET_IFNAME` names.
    pub gloo_interfaces: Option<String>,
}

pub(super) fn group_by_key<K: PartialEq, T>(
    items: impl IntoIterator<Item = (K, T)>,
) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for (key, item) in items {
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    groups
}

pub(super) fn singular_or_plural<'a, T>(of: &[T], one: &'a str, several: &'a str) -> &'a str {
    if of.len() == 1 { one } else { several }
}

pub(super) fn list<S: AsRef<str>>(names: &[S]) -> String {
    host::rails::list(names.iter().map(AsRef::as_ref))
}

/// Joins the commands for several things, each of which must succeed before the next.
pub(super) fn each<T>(
    things: impl IntoIterator<Item = T>,
    command: impl FnMut(T) -> String,
) -> String {
    let commands: Vec<String> = things.into_iter().map(command).collect();
    commands.join(" && ")
}

/// Returns the commands that show whether RoCE is on, on the devices at these PCI addresses.
pub(super) fn show_roce<S: AsRef<str>>(addresses: &[S]) -> String {
    each(addresses, |address| {
        format!(
            "devlink dev param show pci/{} name enable_roce",
            address.as_ref()
        )
    })
}
