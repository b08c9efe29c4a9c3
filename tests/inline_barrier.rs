//! Every path through `isend` to `post_send` of an inline write contains a load barrier, `dmb
//! oshld`, in the compiled aarch64 library (reason: `crates/verbs/src/barrier.rs`).
//!
//! `SPARK_TEST_AARCH64_LIBRARY` names a build of the library that has its symbols. CI makes this
//! build for the test. `objdump`, from binutils for aarch64, disassembles it.

#[path = "common/skip.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod skip;

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

const BARRIER: &str = "dmb\toshld";
/// Part of the name of a function that is called only on the inline path, for a write with too many
/// bytes. Its calls show where the inline path is.
const INLINE_PATH: &str = "too_long_for_inline";

#[test]
fn each_inline_post_has_a_load_barrier_before_it() {
    let Ok(library) = std::env::var("SPARK_TEST_AARCH64_LIBRARY") else {
        return skip::skip("SPARK_TEST_AARCH64_LIBRARY does not name the library");
    };
    let arguments = ["--disassemble", "--no-show-raw-insn"];
    let output = Command::new("aarch64-linux-gnu-objdump")
        .args(arguments)
        .arg(&library)
        .output();
    let output = output.expect("aarch64-linux-gnu-objdump, of binutils-aarch64-linux-gnu");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).expect("plain text");
    // `isend` has two entry points: v8's, with lengths of type `int`, and that of later versions.
    let is_entry = |name: &str| {
        ["10net_tables8isend_v817h", "5calls5isend17h"]
            .iter()
            .any(|entry| name.contains(entry))
    };
    let entries: Vec<Function> = functions(&text)
        .filter(|function| is_entry(function.name))
        .collect();
    assert_eq!(entries.len(), 2, "isend's entry points in {library}");
    for function in entries {
        let posts = function.inline_posts();
        assert!(!posts.is_empty(), "no inline post in {}", function.name);
        let unordered = function.reached_without(BARRIER);
        for post in posts {
            assert!(
                !unordered.contains(&post),
                "{}: {post:x} is reached without {BARRIER}",
                function.name
            );
        }
    }
}

struct Function<'a> {
    name: &'a str,
    instructions: BTreeMap<u64, &'a str>,
}

/// Parses the functions of a disassembly. A function has a line with its name and a line for each
/// instruction. An empty line ends it.
fn functions(text: &str) -> impl Iterator<Item = Function<'_>> {
    text.split("\n\n").filter_map(|block| {
        let (head, body) = block.trim_start().split_once('\n')?;
        let name = head.split_once('<')?.1.strip_suffix(">:")?;
        let instruction = |line: &'_ str| -> Option<(u64, usize)> {
            let (address, _) = line.split_once(':')?;
            Some((
                u64::from_str_radix(address.trim(), 16).ok()?,
                address.len() + 1,
            ))
        };
        let instructions = body
            .lines()
            .filter_map(|line| instruction(line).map(|(at, from)| (at, line[from..].trim())));
        Some(Function {
            name,
            instructions: instructions.collect(),
        })
    })
}

impl Function<'_> {
    /// Returns the addresses of the calls of `post_send` for inline writes. These are the first
    /// calls by pointer after a check of the inline size, on the branch where the write is not too
    /// long.
    fn inline_posts(&self) -> BTreeSet<u64> {
        let refusals = self
            .instructions
            .iter()
            .filter(|(_, text)| text.starts_with("bl\t") && text.contains(INLINE_PATH));
        let refusals: BTreeSet<u64> = refusals.map(|(at, _)| *at).collect();
        let asks = self.instructions.keys().filter(|at| {
            let ways = self.next(**at);
            ways.len() == 2
                && ways
                    .iter()
                    .filter(|way| self.runs_into(**way, &refusals))
                    .count()
                    == 1
        });
        let fits = asks
            .flat_map(|at| self.next(*at))
            .filter(|way| !self.runs_into(*way, &refusals));
        fits.flat_map(|way| self.first_calls_by_pointer(way))
            .collect()
    }

    /// True if the straight path from `at`, without branches, leads to one of `places`.
    fn runs_into(&self, mut at: u64, places: &BTreeSet<u64>) -> bool {
        let mut seen = BTreeSet::new();
        while seen.insert(at) {
            if places.contains(&at) {
                return true;
            }
            match self.next(at)[..] {
                [only] => at = only,
                _ => return false,
            }
        }
        false
    }

    fn first_calls_by_pointer(&self, from: u64) -> BTreeSet<u64> {
        let is_call = |at: &u64| self.instructions[at].starts_with("blr\t");
        let reached = self.reached(from, |text| text.starts_with("blr\t"));
        reached.into_iter().filter(is_call).collect()
    }

    /// Returns the instructions that can be reached from the function's first instruction without
    /// passing an instruction that starts with `text`.
    fn reached_without(&self, text: &str) -> BTreeSet<u64> {
        let first = *self
            .instructions
            .keys()
            .next()
            .expect("a function has instructions");
        self.reached(first, |instruction| instruction.starts_with(text))
    }

    /// Returns the instructions reachable from `from`, up to those for which `ends` is true.
    fn reached(&self, from: u64, ends: impl Fn(&str) -> bool) -> BTreeSet<u64> {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(at) = open.pop() {
            if self.instructions.contains_key(&at)
                && seen.insert(at)
                && !ends(self.instructions[&at])
            {
                open.extend(self.next(at));
            }
        }
        seen
    }

    /// Returns the instructions of the function that can directly follow the instruction at `at`.
    /// Assumes that every called function returns.
    fn next(&self, at: u64) -> Vec<u64> {
        let Some(text) = self.instructions.get(&at) else {
            return Vec::new();
        };
        let (operation, operands) = text.split_once('\t').unwrap_or((text, ""));
        let target = || {
            let word = operands
                .split(['\t', ' ', ','])
                .find_map(|word| u64::from_str_radix(word, 16).ok());
            word.filter(|target| self.instructions.contains_key(target))
        };
        let last = || {
            let operand = operands.split(", ").last()?.split_whitespace().next()?;
            u64::from_str_radix(operand, 16).ok()
        };
        match operation {
            "ret" | "br" | "udf" | "brk" => Vec::new(),
            "b" => target().into_iter().collect(),
            "cbz" | "cbnz" | "tbz" | "tbnz" => last().into_iter().chain([at + 4]).collect(),
            conditional if conditional.starts_with("b.") => {
                target().into_iter().chain([at + 4]).collect()
            }
            _ => vec![at + 4],
        }
    }
}

#[test]
fn a_barrier_counts_only_where_every_way_to_the_post_leads_through_it() {
    let made = |before: &str, inline: &str| {
        format!(
            "0000000000001000 <f>:\n    1000:\t{before}\n    1004:\tcbz\tw14, 1020 <f+0x20>\n    1008:\tcmp\tw9, w22\n    \
             100c:\tb.cc\t1028 <f+0x28>  // b.lo\n    1010:\t{inline}\n    1014:\tblr\tx8\n    1018:\tret\n    1020:\tblr\tx8\n    \
             1024:\tret\n    1028:\tmov\tw1, w22\n    102c:\tbl\t9000 <x{INLINE_PATH}y>\n    1030:\tb\t1018 <f+0x18>\n"
        )
    };
    let is_ordered = |before: &str, inline: &str| {
        let text = made(before, inline);
        let function = functions(&text).next().unwrap();
        assert_eq!(
            function.inline_posts().into_iter().collect::<Vec<_>>(),
            [0x1014]
        );
        !function.reached_without(BARRIER).contains(&0x1014)
    };
    assert!(is_ordered("nop", BARRIER) && is_ordered(BARRIER, "nop"));
    assert!(!is_ordered("nop", "nop") && !is_ordered("dmb\tishld", "dmb\tishld"));
}
