//! Reader of callgrind's dumps (format version 1, "Callgrind Format Specification" in valgrind's
//! manual). It reads no compressed names and positions: `callgrind.rs` turns their compression off.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dump {
    /// Instructions of each place's own code, without those of the functions that it calls.
    pub own: BTreeMap<Place, u64>,
    /// Calls, also within one library file. The key is the caller's library file, the called
    /// function's library file, and the called function.
    pub calls: BTreeMap<(String, String, String), Calls>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub object: String,
    pub function: String,
    /// Source file of the code. For inlined code this is not the function's file.
    pub source: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Calls {
    pub count: u64,
    /// Instructions of the called function and of everything that it calls.
    pub instructions: u64,
}

impl Dump {
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut dump = Self::default();
        let mut place = Place::default();
        let mut called_object = None;
        let mut called = String::new();
        let mut count: Option<u64> = None;
        for (at, line) in text.lines().enumerate() {
            let bad = || format!("line {}: {line:?}", at + 1);
            let field = line
                .split_once('=')
                .filter(|(key, _)| key.chars().all(|c| c.is_ascii_alphabetic()));
            if let Some((key, value)) = field {
                match key {
                    "ob" => value.clone_into(&mut place.object),
                    "fn" => value.clone_into(&mut place.function),
                    "fl" | "fi" | "fe" => value.clone_into(&mut place.source),
                    "cob" => called_object = Some(value.to_owned()),
                    "cfn" => value.clone_into(&mut called),
                    "calls" => {
                        count = Some(
                            value
                                .split(' ')
                                .next()
                                .and_then(|n| n.parse().ok())
                                .ok_or_else(bad)?,
                        )
                    }
                    // Source of the called function.
                    "cfl" | "cfi" => {}
                    _ => return Err(bad()),
                }
                continue;
            }
            // Lines of the head and of the sums have the form "name: value".
            if line.is_empty() || !line.starts_with(|c: char| c.is_ascii_digit()) {
                continue;
            }
            let cost: u64 = line
                .split(' ')
                .nth(1)
                .and_then(|n| n.parse().ok())
                .ok_or_else(bad)?;
            match count.take() {
                None => *dump.own.entry(place.clone()).or_default() += cost,
                Some(count) => {
                    let callee = called_object.take().unwrap_or_else(|| place.object.clone());
                    let calls = dump
                        .calls
                        .entry((place.object.clone(), callee, called.clone()))
                        .or_default();
                    calls.count += count;
                    calls.instructions += cost;
                }
            }
        }
        Ok(dump)
    }

    /// Returns the instructions of a library's own code.
    pub fn of(&self, object: &str) -> u64 {
        self.own
            .iter()
            .filter(|(place, _)| place.object == object)
            .map(|(_, cost)| cost)
            .sum()
    }

    /// Returns the calls from `object` into other libraries, except the libraries in `but`.
    pub fn leaving<'a>(
        &'a self,
        object: &'a str,
        but: &'a [&str],
    ) -> impl Iterator<Item = (&'a str, Calls)> {
        self.calls
            .iter()
            .filter_map(move |((caller, callee, function), calls)| {
                let leaves =
                    caller == object && callee != object && !but.contains(&callee.as_str());
                leaves.then_some((function.as_str(), *calls))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\ncmd: a --b=c\nevents: Ir\nsummary: 40\n\nob=/a.so\nfl=x.rs\nfn=post\n12 5\nfi=y.rs\n13 2\ncob=/libc.so\n\
        cfl=m.c\ncfn=memcpy\ncalls=3 0\n14 30\n15 1\ncfn=inner\ncalls=1 0\n16 4\n\nfn=inner\n20 4\n\nob=/libc.so\nfn=memcpy\n\
        1 30\ntotals: 42\n";

    #[test]
    fn own_cost_excludes_the_cost_of_calls() {
        let dump = Dump::parse(TEXT).unwrap();
        assert_eq!(dump.of("/a.so"), 5 + 2 + 1 + 4);
        assert_eq!(dump.of("/libc.so"), 30);
    }

    #[test]
    fn inlined_code_has_a_source_of_its_own() {
        let dump = Dump::parse(TEXT).unwrap();
        let place = |source: &str| Place {
            object: "/a.so".into(),
            function: "post".into(),
            source: source.into(),
        };
        assert_eq!(dump.own.get(&place("x.rs")), Some(&5));
        assert_eq!(dump.own.get(&place("y.rs")), Some(&3));
    }

    #[test]
    fn each_call_goes_only_to_its_named_object() {
        let dump = Dump::parse(TEXT).unwrap();
        let left: Vec<_> = dump.leaving("/a.so", &[]).collect();
        assert_eq!(
            left,
            [(
                "memcpy",
                Calls {
                    count: 3,
                    instructions: 30
                }
            )]
        );
        assert_eq!(dump.leaving("/a.so", &["/libc.so"]).count(), 0);
    }

    #[test]
    fn unreadable_input_is_an_error() {
        assert!(Dump::parse("jump=3 4\n").is_err());
        assert!(Dump::parse("12\n").is_err());
    }
}
