//! Measurements of a process over time, from outside (`/proc`) where possible.

use std::fs;

/// The measured quantities, with their limits.
///
/// - Descriptors, threads and registrations must be the same after the load as before it. One or
///   two more blocks are allowed, because a queue of this program keeps them.
/// - glibc's bytes in use vary a little with its free lists. Resident pages vary with glibc's
///   arenas, although free memory is returned before a sample. Unlike a leak, these variations do
///   not depend on the length of the load.
/// - During the load, more is allowed, because the samples include connections that are closing.
/// - Shared pages have no limit. They are the fabric's file, which keeps its pages for later queue
///   pairs. Its size is 377 KB times the largest number of queue pairs that existed at one time.
pub const QUANTITIES: [Quantity; 9] = [
    Quantity {
        name: "plugin blocks",
        may_grow: 2,
        may_rise_during_load: 64,
    },
    Quantity {
        name: "plugin bytes",
        may_grow: 8192,
        may_rise_during_load: 65_536,
    },
    Quantity {
        name: "heap KiB",
        may_grow: 512,
        may_rise_during_load: 512,
    },
    Quantity {
        name: "private KiB",
        may_grow: 4096,
        may_rise_during_load: 4096,
    },
    Quantity {
        name: "shared KiB",
        may_grow: ANY,
        may_rise_during_load: ANY,
    },
    Quantity {
        name: "mappings",
        may_grow: 16,
        may_rise_during_load: 16,
    },
    Quantity {
        name: "descriptors",
        may_grow: 0,
        may_rise_during_load: 8,
    },
    Quantity {
        name: "threads",
        may_grow: 0,
        may_rise_during_load: 2,
    },
    Quantity {
        name: "registrations",
        may_grow: 0,
        may_rise_during_load: 2,
    },
];

/// Minimum number of samples for a judgement of the slope.
const MIN_SLOPE_SAMPLES: usize = 30;
const ANY: u64 = u64::MAX;

pub struct Quantity {
    pub name: &'static str,
    /// Allowed rise from before the load to after it. If it is 0, a fall is not allowed either.
    pub may_grow: u64,
    /// Allowed rise of the regression line during the load. Twice the samples' root-mean-square
    /// distance from the line is added to it.
    pub may_rise_during_load: u64,
}

/// Measurements that a process reports of itself.
#[derive(Debug, Clone, Copy)]
pub struct SelfReported {
    /// Bytes that glibc's allocator has handed out, to any library.
    pub heap_bytes: u64,
    /// Blocks that Rust's allocator has handed out to the plugin and to the program around it.
    pub blocks: u64,
    /// Bytes of those blocks.
    pub bytes: u64,
    pub registrations: u64,
}

/// A process's measurements at one moment, in the order of [`QUANTITIES`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    pub at_s: f64,
    pub values: [u64; QUANTITIES.len()],
}

impl Sample {
    pub fn take(pid: u32, at_s: f64, reported: SelfReported) -> Self {
        let status = read(pid, "status");
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let line = line.unwrap_or_else(|| panic!("/proc/{pid}/status has no line {name}"));
            line.split_whitespace()
                .next()
                .and_then(|word| word.parse().ok())
                .unwrap_or_else(|| panic!("/proc/{pid}/status: {name} is not a number"))
        };
        let mappings = read(pid, "maps").lines().count() as u64;
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
            .expect("the process's file descriptors")
            .count() as u64;
        let private = number("RssAnon:");
        let shared = number("RssFile:") + number("RssShmem:");
        let threads = number("Threads:");
        let SelfReported {
            heap_bytes,
            blocks,
            bytes,
            registrations,
        } = reported;
        let values = [
            blocks,
            bytes,
            heap_bytes >> 10,
            private,
            shared,
            mappings,
            descriptors,
            threads,
            registrations,
        ];
        Self { at_s, values }
    }
}

fn read(pid: u32, name: &str) -> String {
    fs::read_to_string(format!("/proc/{pid}/{name}"))
        .unwrap_or_else(|e| panic!("process {pid}, {name}: {e}"))
}

pub fn threads(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process's threads");
    // A thread that ends meanwhile has no name any longer.
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
        .collect()
}

pub struct History {
    pub before: Sample,
    pub during: Vec<Sample>,
    pub after: Sample,
}

impl History {
    /// Returns the rise of the regression line during the load, and the samples' root-mean-square
    /// distance from the line.
    fn slope(&self, quantity: usize) -> (f64, f64) {
        let count = self.during.len() as f64;
        let value = |sample: &Sample| sample.values[quantity] as f64;
        let mean = |value_of: &dyn Fn(&Sample) -> f64| {
            self.during.iter().map(value_of).sum::<f64>() / count
        };
        let when = mean(&|sample| sample.at_s);
        let what = mean(&value);
        let spread = mean(&|sample| (sample.at_s - when).powi(2));
        if self.during.len() < 2 || spread <= 0.0 {
            return (0.0, 0.0);
        }
        let slope_per_s = mean(&|sample| (sample.at_s - when) * (value(sample) - what)) / spread;
        let residual =
            mean(&|sample| (value(sample) - what - slope_per_s * (sample.at_s - when)).powi(2))
                .sqrt();
        (
            slope_per_s * (self.during[self.during.len() - 1].at_s - self.during[0].at_s),
            residual,
        )
    }

    /// Prints a line for each quantity. Returns a text for each quantity beyond its limits.
    pub fn print(&self, process: usize) -> Vec<String> {
        let mut failures = Vec::new();
        for (
            at,
            Quantity {
                name,
                may_grow,
                may_rise_during_load,
            },
        ) in QUANTITIES.iter().enumerate()
        {
            let before = self.before.values[at];
            let after = self.after.values[at];
            let during = || self.during.iter().map(|sample| sample.values[at]);
            let smallest = during().min().unwrap_or(before);
            let largest = during().max().unwrap_or(before);
            let (slope, residual) = self.slope(at);
            let rises = self.during.len() >= MIN_SLOPE_SAMPLES
                && slope > *may_rise_during_load as f64 + 2.0 * residual;
            let verdict = match (
                after > before.saturating_add(*may_grow) || (*may_grow == 0 && after != before),
                rises,
            ) {
                (true, _) => "CHANGED",
                (false, true) => "RISES",
                (false, false) => "ok",
            };
            let may_grow = if *may_grow == ANY {
                "any".to_owned()
            } else {
                may_grow.to_string()
            };
            println!(
                "  {process}  {name:<14} {before:>8} {smallest:>8} ..{largest:>8} {slope:>+9.1} {after:>8} {may_grow:>8}  {verdict}"
            );
            if verdict != "ok" {
                failures.push(format!(
                    "process {process}: {name}: {before} before, {after} after, slope {slope:+.1}: {verdict}"
                ));
            }
        }
        failures
    }
}

pub fn print_head() {
    let [before, smallest, largest, slope, after, may] =
        ["before", "least", "most", "slope", "after", "may grow"];
    println!(
        "  process           {before:>8} {smallest:>8} ..{largest:>8} {slope:>9} {after:>8} {may:>8}"
    );
}
