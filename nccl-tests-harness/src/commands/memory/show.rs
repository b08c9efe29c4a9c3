//! The result of each kind of memory: its fault, and its row of the table.

use super::messages::TestResult;
use crate::gpu::Kind;
use crate::output::table::{Table, left, right};
use std::io::{self, Write};

/// Returns the reason why this kind of memory counts as failed, or `None` if it does not.
pub fn fault(kind: Kind, result: &TestResult) -> Option<String> {
    match (kind, result) {
        (_, TestResult::Moved(moved)) if moved.wrong() > 0 => {
            Some(format!("{} WRONG bytes", moved.wrong()))
        }
        (
            Kind::DeviceAsCuda,
            TestResult::Moved(_)
            | TestResult::Failed {
                registered: true, ..
            },
        ) => Some(
            "was registered as CUDA memory, but the plugin announces host pointers only".to_owned(),
        ),
        (_, TestResult::Moved(_)) => None,
        (Kind::Malloc, TestResult::NotTried { .. }) => Some("not tried".to_owned()),
        (kind, TestResult::Refused { .. }) => kind
            .must_register()
            .then(|| "must be registered, but was not".to_owned()),
        (_, TestResult::NotTried { .. }) => None,
        // The RDMA device itself accepted a GPU address that it then could not read. The table
        // shows this, but the plugin did not fail.
        (
            Kind::Device,
            TestResult::Failed {
                registered: true, ..
            },
        ) => None,
        (_, TestResult::Failed { .. }) => Some("failed".to_owned()),
    }
}

pub fn head(out: &mut impl Write) -> io::Result<()> {
    let mut table = table(out);
    table.remark("")?;
    table.row(&[
        "# kind",
        "registered",
        "writer",
        "checker",
        "moved",
        "wrong",
    ])
}

pub fn row(out: &mut impl Write, kind: Kind, result: &TestResult) -> io::Result<()> {
    let name = kind.name();
    let mut table = table(out);
    match result {
        TestResult::NotTried { reason } => {
            table.row(&[name, "not tried", "-", "-", "-", "-"])?;
            table.remark(&format!("{name}: not tried: {reason}"))
        }
        TestResult::Refused { reason } => {
            table.row(&[name, "no", "-", "-", "-", "-"])?;
            table.remark(&format!("{name}: not registered: {reason}"))
        }
        TestResult::Failed { registered, reason } => {
            table.row(&[
                name,
                if *registered { "yes" } else { "no" },
                "-",
                "-",
                "no",
                "-",
            ])?;
            let what = if *registered {
                "not moved"
            } else {
                "failed before registration"
            };
            reason
                .lines()
                .try_for_each(|text| table.remark(&format!("{name}: {what}: {text}")))
        }
        TestResult::Moved(moved) => {
            let sizes = moved.messages.len();
            let largest = moved
                .messages
                .iter()
                .map(|message| message.bytes)
                .max()
                .unwrap_or_default();
            let sizes = if sizes == 1 {
                format!("1 size, {largest}")
            } else {
                format!("{sizes} sizes to {largest}")
            };
            table.row(&[
                name,
                "yes",
                &moved.written_by,
                &moved.checked_by,
                &sizes,
                &moved.wrong().to_string(),
            ])?;
            let mut faults = moved.messages.iter().filter_map(|message| message.fault());
            faults.try_for_each(|text| table.remark(&format!("{name}: {text}")))
        }
    }
}

fn table<W: Write>(out: W) -> Table<W> {
    Table::new(
        out,
        "  ",
        [left(19), left(10), left(7), left(7), left(19), right(6)],
    )
}

#[cfg(test)]
mod tests {
    use super::super::messages::{Message, Moved};
    use super::*;

    fn moved(wrong: u32, beyond: u32) -> TestResult {
        let good = Message {
            bytes: 8,
            wrong: 0,
            first_wrong: None,
            beyond: 0,
        };
        let last = Message {
            bytes: 65_540,
            wrong,
            first_wrong: (wrong > 0).then_some(17),
            beyond,
        };
        TestResult::Moved(Moved {
            written_by: "GPU 0".into(),
            checked_by: "GPU 1".into(),
            messages: vec![good, last],
        })
    }

    fn not_tried() -> TestResult {
        TestResult::NotTried {
            reason: "libcuda not found".into(),
        }
    }

    fn refused() -> TestResult {
        TestResult::Refused {
            reason: "regMr returned ncclInvalidUsage (5): no".into(),
        }
    }

    fn failed(registered: bool) -> TestResult {
        TestResult::Failed {
            registered,
            reason: "killed".into(),
        }
    }

    #[test]
    fn memory_that_nccl_needs_must_work_where_available() {
        for kind in [Kind::Malloc, Kind::HostAlloc, Kind::HostRegister] {
            assert_eq!(fault(kind, &moved(0, 0)), None);
            assert!(
                fault(kind, &refused())
                    .unwrap()
                    .contains("must be registered"),
                "{kind:?}"
            );
            assert!(
                fault(kind, &failed(true)).is_some() && fault(kind, &failed(false)).is_some(),
                "{kind:?}"
            );
            assert_eq!(
                fault(kind, &not_tried()).is_some(),
                kind == Kind::Malloc,
                "{kind:?}"
            );
        }
    }

    #[test]
    fn managed_and_device_memory_may_be_refused_but_never_be_wrong() {
        for kind in [Kind::Managed, Kind::Device, Kind::DeviceAsCuda] {
            assert_eq!(
                (fault(kind, &refused()), fault(kind, &not_tried())),
                (None, None),
                "{kind:?}"
            );
            assert!(fault(kind, &failed(false)).is_some(), "{kind:?}");
            assert_eq!(
                fault(kind, &failed(true)).is_none(),
                kind == Kind::Device,
                "{kind:?}"
            );
            assert_eq!(
                fault(kind, &moved(0, 0)).is_none(),
                kind != Kind::DeviceAsCuda,
                "{kind:?}"
            );
        }
        for kind in Kind::ALL {
            assert!(
                fault(kind, &moved(3, 0)).unwrap().contains("3 WRONG"),
                "{kind:?}"
            );
            assert!(
                fault(kind, &moved(0, 2)).unwrap().contains("2 WRONG"),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn rows_show_what_arrived_and_lines_give_the_reasons() {
        let mut out = Vec::new();
        head(&mut out).unwrap();
        row(&mut out, Kind::Malloc, &moved(0, 0)).unwrap();
        row(&mut out, Kind::HostAlloc, &moved(5, 1)).unwrap();
        row(&mut out, Kind::Managed, &not_tried()).unwrap();
        row(&mut out, Kind::Device, &failed(true)).unwrap();
        row(&mut out, Kind::DeviceAsCuda, &refused()).unwrap();
        let text = String::from_utf8(out).unwrap();
        let expected = [
            "#",
            "# kind               registered  writer   checker  moved                 wrong",
            "malloc               yes         GPU 0    GPU 1    2 sizes to 65540          0",
            "cudaHostAlloc        yes         GPU 0    GPU 1    2 sizes to 65540          6",
            "# cudaHostAlloc: 5 of 65540 bytes WRONG, the first at 17, and 1 of the bytes after them CHANGED",
            "cudaMallocManaged    not tried   -        -        -                         -",
            "# cudaMallocManaged: not tried: libcuda not found",
            "cudaMalloc           yes         -        -        no                        -",
            "# cudaMalloc: not moved: killed",
            "cudaMalloc, as CUDA  no          -        -        -                         -",
            "# cudaMalloc, as CUDA: not registered: regMr returned ncclInvalidUsage (5): no",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        assert!(
            expected
                .iter()
                .filter(|line| !line.contains(": "))
                .all(|line| line.len() <= 80)
        );
    }
}
