//! Fuzz targets for everything that an unauthenticated client, a lying peer or a careless user can
//! hand to this project.
//!
//! Each target is a module. Its `check` takes any bytes and asserts the invariants. Its `seeds`
//! gives the inputs to begin with, which `examples/seeds.rs` writes into the folder `seeds/`.
//! `run.sh` builds and runs the targets with libFuzzer. `cargo test --lib` compares the files in
//! `seeds/` with the targets' `seeds`, and runs every check on its seeds, without libFuzzer.
//!
//! The stateful targets read their input as a [`tape::Tape`] of decisions: the next event, and the
//! peer's lies. Each of these targets compares the code with a model of its own.

pub mod admission;
pub mod clear_to_send;
pub mod control;
pub mod control_link;
mod fields;
pub mod handle;
pub mod handshake;
pub mod mailbox;
pub mod memory;
pub mod profile;
pub mod receives;
pub mod recovery;
pub mod settings;
pub mod streams;
pub mod tape;
pub mod target;

use target::Target;

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "handle",
        check: handle::check,
        seeds: handle::seeds,
    },
    Target {
        name: "handshake",
        check: handshake::check,
        seeds: handshake::seeds,
    },
    Target {
        name: "control",
        check: control::check,
        seeds: control::seeds,
    },
    Target {
        name: "mailbox",
        check: mailbox::check,
        seeds: mailbox::seeds,
    },
    Target {
        name: "clear_to_send",
        check: clear_to_send::check,
        seeds: clear_to_send::seeds,
    },
    Target {
        name: "receives",
        check: receives::check,
        seeds: receives::seeds,
    },
    Target {
        name: "streams",
        check: streams::check,
        seeds: streams::seeds,
    },
    Target {
        name: "recovery",
        check: recovery::check,
        seeds: recovery::seeds,
    },
    Target {
        name: "control_link",
        check: control_link::check,
        seeds: control_link::seeds,
    },
    Target {
        name: "admission",
        check: admission::check,
        seeds: admission::seeds,
    },
    Target {
        name: "settings",
        check: settings::check,
        seeds: settings::seeds,
    },
    Target {
        name: "profile",
        check: profile::check,
        seeds: profile::seeds,
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// A seed must have fewer bytes than this. Larger seeds only slow libFuzzer down.
    const MOST_BYTES: usize = 4096;

    #[test]
    fn every_seed_is_small_and_is_valid_or_named_refused() {
        for target in TARGETS {
            for (name, bytes) in (target.seeds)() {
                assert!(
                    bytes.len() < MOST_BYTES,
                    "{}/{name}: {} bytes",
                    target.name,
                    bytes.len()
                );
                let is_refused = name.starts_with("refused");
                assert_eq!(
                    (target.check)(&bytes),
                    !is_refused,
                    "{}/{name}",
                    target.name
                );
            }
        }
    }

    #[test]
    fn the_kept_seeds_match_the_program() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
        let mut kept = BTreeSet::new();
        for folder in std::fs::read_dir(&root).expect("the folder of seeds") {
            for file in
                std::fs::read_dir(folder.expect("a folder").path()).expect("a target's seeds")
            {
                kept.insert(file.expect("a seed").path());
            }
        }
        let mut written = BTreeSet::new();
        for target in TARGETS {
            for (name, bytes) in (target.seeds)() {
                let path = root.join(target.name).join(name);
                let found = std::fs::read(&path)
                    .unwrap_or_else(|e| panic!("{}: {e}; see examples/seeds.rs", path.display()));
                assert!(
                    found == bytes,
                    "{} differs from the generated seed",
                    path.display()
                );
                assert!(written.insert(path), "two seeds {name} of {}", target.name);
            }
        }
        assert_eq!(kept, written);
    }

    #[test]
    fn invalid_input_is_refused() {
        // The stateful targets accept any bytes as a tape. These four decode the bytes directly.
        for target in TARGETS
            .iter()
            .filter(|target| ["handle", "handshake", "control", "profile"].contains(&target.name))
        {
            for bytes in [&[][..], &[0xff; 300], b"GET / HTTP/1.1\r\n\r\n"] {
                assert!(!(target.check)(bytes), "{} takes {bytes:?}", target.name);
            }
        }
    }
}
