//! Tests of `verbs` on the kernel's soft-RoCE: two QPs of one process, connected over the network.
//!
//! They need two soft-RoCE devices that reach each other, as in the test bed, and their names:
//! `SPARK_TEST_RXE=a0,b0 cargo test --test verbs_rxe -- --ignored --test-threads 1`
#![allow(unsafe_code)]

#[path = "common/captured_log.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod captured_log;
#[path = "common/counting.rs"]
mod counting;

use captured_log::CapturedLog;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use host::config::QpConfig;
use host::error::Error;
use host::port::{GidEntry, GidKind, LinkLayer, PortState};
use verbs::{
    Access, AsyncEvent, CompletionBuffer, Context, Cq, HostMemory, Library, Mr, Path, Pd, Qp,
    QpCaps, Region, Remote, Write,
};

const PORT: u8 = 1;
const WRITABLE: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
const ACKNOWLEDGEMENT: QpConfig = QpConfig {
    timeout: 14,
    retry_count: 7,
    flow_label: 0,
};
const WORDS: usize = 1 << 17;
/// Completion status `IBV_WC_WR_FLUSH_ERR`.
const FLUSHED: u32 = 5;
/// Completion status `IBV_WC_REM_ACCESS_ERR`.
const REMOTE_ACCESS: u32 = 10;

struct End {
    qp: Qp,
    cq: Cq,
    mr: Mr,
    region: Arc<Region>,
    context: Arc<Context>,
    gid: GidEntry,
}

impl End {
    fn new(device: &str) -> Self {
        let library = Library::load("libibverbs.so.1").expect("libibverbs is installed");
        let devices = library.devices().expect("devices are listed");
        let device = devices
            .iter()
            .find(|candidate| candidate.name() == device)
            .expect("the device exists");
        let context = device.open().expect("the device opens");
        let gid = routable_gid(&context);
        let pd = Pd::new(&context).expect("a domain");
        let cq = Cq::new(&context, 256).expect("a CQ");
        let region = Region::new(WORDS * 8).expect("a region");
        let mr = region.register(&pd, WRITABLE).expect("a registration");
        let caps = QpCaps {
            send_requests: 64,
            receive_requests: 64,
            inline_bytes: 64,
        };
        let mut qp = Qp::new(&pd, &cq, caps).expect("a QP");
        qp.init(PORT).expect("INIT");
        Self {
            qp,
            cq,
            mr,
            region,
            context,
            gid,
        }
    }

    fn connect(&mut self, peer_qp: u32, peer: &GidEntry, receive_psn: u32, send_psn: u32) {
        let path = Path {
            port: PORT,
            mtu_bytes: self.context.port(PORT).expect("the port").active_mtu_bytes,
            remote_qp: peer_qp,
            receive_psn,
            gid_index: self.gid.index,
            remote_gid: peer.gid,
            traffic_class: 106,
            service_level: 0,
            flow_label: 0,
        };
        self.qp.ready_to_receive(&path).expect("RTR");
        self.qp
            .ready_to_send(ACKNOWLEDGEMENT, send_psn)
            .expect("RTS");
    }

    fn remote(&self, offset: u64) -> Remote {
        Remote {
            addr: self.region.addr() + offset,
            rkey: self.mr.rkey(),
        }
    }

    /// Waits for one completion. Returns its work request's id, its status and, if it has immediate
    /// data, that data and the byte count.
    fn wait(&mut self, buffer: &mut CompletionBuffer) -> (u64, u32, Option<(u32, u32)>) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let found = self.cq.poll(buffer).expect("a CQ that works");
            assert!(
                found.len() <= 1,
                "more than one completion, although one request is in flight"
            );
            if let [completion] = found {
                assert_eq!(completion.qp_num(), self.qp.number());
                let immediate = completion
                    .is_receive_immediate()
                    .then(|| (completion.immediate(), completion.bytes()));
                return (completion.wr_id(), completion.status(), immediate);
            }
            assert!(Instant::now() < deadline, "nothing completed");
        }
    }
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn a_device_reports_its_port_and_addresses() {
    let (a, _) = device_names();
    let end = End::new(&a);
    assert_eq!(end.context.name(), a);
    assert_eq!(end.context.ports(), 1);
    assert!(
        end.context.limits().max_qp_wr >= 64 && end.context.limits().max_cqe >= 256,
        "{:?}",
        end.context.limits()
    );
    let port = end.context.port(PORT).expect("the port");
    assert_eq!(
        (port.state, port.link_layer),
        (PortState::Active, LinkLayer::Ethernet)
    );
    assert_eq!(
        port.active_mtu_bytes, 4096,
        "the bed's links have an MTU of 9000"
    );
    assert!(port.max_message_bytes >= 1 << 20, "{port:?}");
    assert_eq!(
        format!("{} Gb/sec", f64::from(port.speed_mbps) / 1000.0),
        sysfs_rate(&a)
    );
    assert_ne!(end.gid.ifindex, 0);
    assert!(end.context.port(9).is_err(), "there is no port 9");
    assert_eq!(
        end.context.async_event().expect("reading async events"),
        None
    );
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn writes_arrive_whole_with_their_immediate() {
    let (mut a, mut b) = connected();
    let mut buffer = CompletionBuffer::new();
    for (index, word) in a.region.words().iter().enumerate() {
        word.store(
            0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(index as u64 + 1),
            Ordering::Relaxed,
        );
    }
    b.qp.post_receives(3, 70).expect("receives");

    // First 13 bytes, without a completion at the sender. Then the whole region.
    for (bytes, immediate, signaled) in
        [(13, 0x0102_0304, false), (WORDS as u32 * 8, u32::MAX, true)]
    {
        let write = Write {
            local_addr: a.region.addr(),
            bytes,
            lkey: a.mr.lkey(),
            remote: b.remote(0),
            immediate: Some(immediate),
            wr_id: 5,
            signaled,
        };
        a.qp.write(&write).expect("a write");
        assert_eq!(b.wait(&mut buffer), (70, 0, Some((immediate, bytes))));
        let sent = bytes_of(&a.region, bytes as usize);
        let got = bytes_of(&b.region, bytes as usize + 1);
        assert_eq!(sent, got[..bytes as usize], "{bytes} bytes");
        if bytes == 13 {
            assert_eq!(got[13], 0, "no byte more than was sent");
        }
    }
    assert_eq!(
        a.wait(&mut buffer),
        (5, 0, None),
        "only the signaled write completes at the sender"
    );

    a.qp.write_inline([].as_slice().into(), b.remote(0), Some(9), 6, true)
        .expect("an empty write");
    assert_eq!(b.wait(&mut buffer), (70, 0, Some((9, 0))));
    assert_eq!(a.wait(&mut buffer), (6, 0, None));
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn inline_writes_need_no_registration_and_have_a_limit() {
    let (mut a, b) = connected();
    let mut buffer = CompletionBuffer::new();
    let bytes: [u8; 64] = std::array::from_fn(|index| index as u8 + 1);
    a.qp.write_inline(bytes.as_slice().into(), b.remote(128), None, 1, true)
        .expect("an inline write");
    assert_eq!(a.wait(&mut buffer), (1, 0, None));
    assert_eq!(bytes_of(&b.region, 256)[128..192], bytes);
    let too_long = vec![0; a.qp.inline_bytes() as usize + 1];
    assert!(matches!(
        a.qp.write_inline(too_long.as_slice().into(), b.remote(0), None, 2, true)
            .map_err(|error| *error),
        Err(Error::Argument(_))
    ));
    assert!(matches!(
        a.qp.post_receives(65, 0).map_err(|error| *error),
        Err(Error::Argument(_))
    ));
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn the_data_path_does_not_allocate() {
    let (mut a, mut b) = connected();
    let mut buffer = CompletionBuffer::new();
    let exchange = |round| {
        b.qp.post_receives(2, round).expect("receives");
        let write = Write {
            local_addr: a.region.addr(),
            bytes: 4096,
            lkey: a.mr.lkey(),
            remote: b.remote(0),
            immediate: Some(1),
            wr_id: round,
            signaled: true,
        };
        a.qp.write(&write).expect("a write");
        a.wait(&mut buffer);
        b.wait(&mut buffer);
        a.qp.write_inline([7; 64].as_slice().into(), b.remote(0), Some(2), round, true)
            .expect("an inline write");
        a.wait(&mut buffer);
        b.wait(&mut buffer);
    };
    assert_eq!(counting::allocations(|| (0..100).for_each(exchange)), 0);
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn a_wrong_key_fails_the_write_and_a_failed_qp_flushes() {
    let (mut a, b) = connected();
    let mut buffer = CompletionBuffer::new();
    let wrong = Remote {
        rkey: b.mr.rkey() ^ 0x5500,
        ..b.remote(0)
    };
    a.qp.write_inline([1; 8].as_slice().into(), wrong, None, 11, false)
        .expect("it is posted");
    assert_eq!(
        a.wait(&mut buffer),
        (11, REMOTE_ACCESS, None),
        "a failed write completes even if it was not signaled"
    );
    assert_eq!(b.region.words()[0].load(Ordering::Acquire), 0);

    let (mut c, mut d) = connected();
    d.qp.post_receives(1, 12).expect("a receive");
    d.qp.fail().expect("ERR");
    assert_eq!(d.wait(&mut buffer), (12, FLUSHED, None));
    c.qp.fail().expect("ERR");
    let text =
        c.qp.ready_to_send(ACKNOWLEDGEMENT, 0)
            .expect_err("a QP in ERR does not go to RTS");
    assert!(
        text.to_string()
            .contains(&format!("QP {} of {}", c.qp.number(), c.context.name())),
        "{text}"
    );
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn a_full_send_queue_is_reported() {
    let (a, b) = device_names();
    let mut a = End::new(&a);
    let b = End::new(&b);
    // No queue pair has this number, so nothing is ever acknowledged and the queue only fills.
    a.connect(0xff_ffff, &b.gid, 0, 0);
    let refused = (0..10_000).find_map(|_| {
        a.qp.write_inline([1; 8].as_slice().into(), b.remote(0), None, 0, false)
            .err()
    });
    assert!(
        matches!(
            refused.as_deref(),
            Some(Error::Os {
                errno: libc::ENOMEM,
                ..
            })
        ),
        "{refused:?}"
    );
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn callers_memory_is_registered_with_strict_and_relaxed_ordering() {
    let (a, _) = device_names();
    let context = End::new(&a).context;
    let pd = Pd::new(&context).expect("a domain");
    let bytes = vec![0_u8; 10_000];
    // SAFETY: the vector outlives both registrations.
    let memory = unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
    let strict = Mr::register(&pd, memory, WRITABLE).expect("a registration");
    let relaxed =
        Mr::register(&pd, memory, WRITABLE | Access::RELAXED_ORDERING).expect("a registration");
    assert_ne!(strict.lkey(), relaxed.lkey());
    let region = Region::new(4096).expect("a region");
    let region_registration = region.register(&pd, WRITABLE).expect("a registration");
    assert_eq!(
        Arc::strong_count(&region),
        2,
        "the registration keeps the region mapped"
    );
    drop(region_registration);
    assert_eq!(Arc::strong_count(&region), 1);
    // SAFETY: the address is not mapped, so the kernel refuses it.
    let nothing = unsafe { HostMemory::from_caller(0x1000, 4096) };
    let text = Mr::register(&pd, nothing, WRITABLE)
        .err()
        .expect("nothing is there")
        .to_string();
    assert!(
        text.contains("4096 bytes at 0x1000") && text.contains(&a),
        "{text}"
    );
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn objects_can_be_dropped_in_any_order() {
    // A failing destructor, for example of an object in use, shows only in the log.
    let log = CapturedLog::default();
    let descriptors = open_descriptors();
    log.capture(|| {
        for order in 0..4 {
            let (a, b) = connected();
            let End {
                qp,
                cq,
                mr,
                region,
                context,
                ..
            } = a;
            match order {
                0 => drop((context, region, cq, mr, qp)),
                1 => drop((region, mr, context, qp, cq)),
                2 => drop((cq, region, context, mr, qp)),
                _ => drop((qp, mr, cq, region, context)),
            }
            drop(b);
        }
    });
    // Failed calls are logged at DEBUG. Each opened device also logs an INFO line about its
    // doorbells, which is not a failure.
    let failures: Vec<_> = log
        .take()
        .into_iter()
        .filter(|(level, _)| *level == tracing::Level::DEBUG)
        .collect();
    assert_eq!(failures, [], "calls that failed");
    assert_eq!(
        open_descriptors(),
        descriptors,
        "contexts that are still open"
    );
}

#[test]
#[ignore = "needs two soft-RoCE devices (SPARK_TEST_RXE=a0,b0)"]
fn a_port_that_goes_down_is_an_event() {
    let (a, _) = device_names();
    let context = End::new(&a).context;
    let netdev = std::fs::read_to_string(format!(
        "/sys/class/infiniband/{a}/ports/1/gid_attrs/ndevs/0"
    ));
    let netdev = netdev
        .expect("the device has a network device")
        .trim()
        .to_owned();
    for (state, kind) in [
        ("down", AsyncEvent::PORT_ERROR),
        ("up", AsyncEvent::PORT_ACTIVE),
    ] {
        let status = std::process::Command::new("ip")
            .args(["link", "set", &netdev, state])
            .status();
        assert!(status.is_ok_and(|status| status.success()));
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match context.async_event().expect("reading async events") {
                Some(event) if event.kind == kind => {
                    assert_eq!(event.port, Some(PORT));
                    break;
                }
                _ => assert!(
                    Instant::now() < deadline,
                    "no event for a port going {state}"
                ),
            }
        }
    }
}

fn connected() -> (End, End) {
    let (a, b) = device_names();
    let mut a = End::new(&a);
    let mut b = End::new(&b);
    let a_qp = a.qp.number();
    let b_qp = b.qp.number();
    let a_gid = a.gid;
    let b_gid = b.gid;
    a.connect(b_qp, &b_gid, 0xff_fffe, 1);
    b.connect(a_qp, &a_gid, 1, 0xff_fffe);
    (a, b)
}

fn device_names() -> (String, String) {
    let names = std::env::var("SPARK_TEST_RXE")
        .expect("SPARK_TEST_RXE names two devices, for example a0,b0");
    let (a, b) = names
        .split_once(',')
        .expect("two names with a comma between");
    (a.to_owned(), b.to_owned())
}

fn routable_gid(context: &Context) -> GidEntry {
    let table = context.gid_table(PORT).expect("the GID table");
    let ipv4_mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let found = table
        .iter()
        .find(|entry| entry.kind == GidKind::RoceV2 && entry.gid.starts_with(&ipv4_mapped));
    *found.unwrap_or_else(|| panic!("no IPv4 address among {table:?}"))
}

/// Returns the port's rate from sysfs, without the bracket: `40 Gb/sec` of `40 Gb/sec (4X QDR)`.
fn sysfs_rate(device: &str) -> String {
    let rate = std::fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/1/rate"))
        .expect("the rate file");
    rate.split(" (").next().unwrap_or_default().to_owned()
}

fn bytes_of(region: &Region, count: usize) -> Vec<u8> {
    let words = &region.words()[..count.div_ceil(8).min(region.words().len())];
    words
        .iter()
        .flat_map(|word| word.load(Ordering::Acquire).to_ne_bytes())
        .take(count)
        .collect()
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("the list of descriptors")
        .count()
}
