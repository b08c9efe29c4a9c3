//! Lists of device and interface names, in NCCL's grammar.

use super::value::{Parsed, Refusal, number, quoted};

/// List of names as in `NCCL_IB_HCA` and `NCCL_SOCKET_IFNAME`: `[^][=]NAME[:PORT],...`. `^`
/// excludes the names. `=` compares whole names; otherwise a prefix is enough. The two marks come
/// before the first name, in this order, and apply to all names. An empty list admits everything.
///
/// The grammar is that of NCCL's parser (`parseStringList` and `matchIfList` in its `utils.cc`).
/// Rail and plane numbers after a port (NCCL 2.30) are ignored, because the plugin shows NCCL all
/// its rails as one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NameFilter {
    excludes: bool,
    whole_names: bool,
    entries: Vec<(String, Option<u8>)>,
}

impl NameFilter {
    /// Largest number of names in a list, the same as NCCL's (`MAX_IB_DEVS`, `net_ib`).
    const MAX_ENTRIES: usize = 32;

    pub(super) fn parse(text: &str) -> Parsed<Self> {
        let (excludes, rest) = strip_mark(text, '^');
        let (whole_names, rest) = strip_mark(rest, '=');
        if rest.is_empty() {
            return if text.is_empty() {
                Ok(Self::default())
            } else {
                Err(Refusal::because("no name follows the mark"))
            };
        }
        let entries = rest
            .split(',')
            .filter(|e| !e.trim().is_empty())
            .map(entry)
            .collect::<Parsed<Vec<_>>>()?;
        match entries.len() {
            0 => return Err(Refusal::because("it has no names")),
            1..=Self::MAX_ENTRIES => {}
            more => return Err(Refusal::because(format!("it has {more} names"))),
        }
        Ok(Self {
            excludes,
            whole_names,
            entries,
        })
    }

    /// Returns true if the list admits the device or interface `name` with this port. An entry
    /// without a port applies to every port. If `port` is `None`, only the names are compared.
    pub fn admits(&self, name: &str, port: Option<u8>) -> bool {
        if self.entries.is_empty() {
            return true;
        }
        let matched = self.entries.iter().any(|(wanted, wanted_port)| {
            let named = if self.whole_names {
                name == wanted
            } else {
                name.starts_with(wanted.as_str())
            };
            named && (wanted_port.is_none() || port.is_none() || *wanted_port == port)
        });
        matched != self.excludes
    }

    /// Returns true if the list names what to use. False for an empty list, and for a list of names
    /// to exclude.
    pub fn names_something(&self) -> bool {
        !self.entries.is_empty() && !self.excludes
    }
}

fn strip_mark(text: &str, mark: char) -> (bool, &str) {
    match text.strip_prefix(mark) {
        Some(rest) => (true, rest),
        None => (false, text),
    }
}

fn entry(text: &str) -> Parsed<(String, Option<u8>)> {
    let wrong = |what: &str| Refusal::because(format!("{what} in {}", quoted(text)));
    let mut fields = text.trim().split(':');
    let name = fields.next().unwrap_or_default();
    let port = match fields.next() {
        None | Some("") => None,
        Some(port) => {
            Some(number::<u8, 1, 255>(port).map_err(|_| wrong("the port must be 1 to 255"))?)
        }
    };
    for rail_or_plane in fields.by_ref().take(2) {
        number::<u64, 0, 65_535>(rail_or_plane)
            .map_err(|_| wrong("rail and plane must be 0 to 65535"))?;
    }
    if fields.next().is_some() {
        return Err(wrong("too many fields"));
    }
    // The characters that the kernel allows in interface names, except those of the grammar.
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '/' | '^' | '=');
    match !name.is_empty() && name.len() <= 64 && name.chars().all(plain) {
        true => Ok((name.to_owned(), port)),
        false => Err(wrong("no device or interface can have the name")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_filter_matches_nccls() {
        let admits = |filter: &str, name: &str, port: u8| {
            NameFilter::parse(filter).unwrap().admits(name, Some(port))
        };
        assert!(admits("", "anything", 1));
        assert!(admits("mlx5", "mlx5_10", 1) && !admits("mlx5", "rocep1s0f0", 1));
        assert!(admits("=mlx5_1", "mlx5_1", 1) && !admits("=mlx5_1", "mlx5_10", 1));
        assert!(!admits("^mlx5_1", "mlx5_10", 1) && admits("^=mlx5_1", "mlx5_10", 1));
        assert!(admits("mlx5_0:1", "mlx5_0", 1) && !admits("mlx5_0:1", "mlx5_0", 2));
        assert!(admits("mlx5_0:1,mlx5_1", "mlx5_1", 2));
        assert!(!admits("^mlx5_0:1,mlx5_1", "mlx5_1", 2) && admits("^mlx5_0:1", "mlx5_0", 2));
        assert!(admits("mlx5_0:", "mlx5_0", 2) && !admits("mlx5_0:1:0:3", "mlx5_0", 2));
        assert!(
            NameFilter::parse("mlx5_0:1:0:3:4").is_err()
                && NameFilter::parse("mlx5_0:1:x").is_err()
        );
        assert!(NameFilter::parse(&vec!["a"; 33].join(",")).is_err());
    }
}
