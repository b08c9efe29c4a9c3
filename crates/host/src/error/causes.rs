//! Causes of errors: an enum for each variant of [`super::Error`], and enums and structs that these
//! contain. The fields of a cause are the names and figures of its event.
//!
//! This module imports no other module of the crate. If a cause contains text that another module
//! or a peer has made, the text is in the field `why` or `how`. Lists of rails are text in the
//! fields `rails`, `lanes` and `tries`.

#![allow(
    missing_docs,
    reason = "the text of each cause explains the cause and its fields"
)]

use proto::wire::operation::Operation;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error as Cause;

const HOW_TO_GET: &str = "on Debian and Ubuntu: apt install libibverbs1 ibverbs-providers; \
    in a container: the same packages in the image, and docker run --device /dev/infiniband --ulimit memlock=-1";

#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum SettingFault {
    #[error("{}{allowed}", .reason.as_ref().map_or_else(String::new, |reason| format!("{reason}; allowed: ")))]
    Value {
        reason: Option<String>,
        allowed: &'static str,
    },
    #[error("no such setting; {}`nccl-spark settings` lists all", .near.map_or_else(String::new, |near| format!("did you mean {near}? ")))]
    Unknown { near: Option<&'static str> },
    #[error("the file cannot be read: {0}")]
    Unreadable(String),
    #[error("a settings file cannot name another one")]
    NamesAFile,
    #[error("a line must be NAME=value; `#` starts a comment")]
    NotALine,
    #[error("line {0} already sets it")]
    SetBefore(usize),
    #[error(
        "a file that names a library must belong to root or to this job's user, and nobody else may write it; this file {0}"
    )]
    Untrusted(String),
    #[error("{0}; it must be where sysfs is mounted, usually /sys")]
    Sysfs(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Missing {
    #[error("read {}: {why}", .path.display())]
    SettingsFile { path: PathBuf, why: String },
    #[error("cannot get random numbers: {0}")]
    Random(getrandom::Error),
    #[error(
        "this process was forked after NCCL had initialised the network, and RDMA does not survive fork(): use NCCL in the parent only, or call exec() first"
    )]
    Forked,
    #[error("NCCL_IBVERBS_LIB={0:?} is not a file name; the default is libibverbs.so.1")]
    LibraryName(String),
    #[error("the RDMA library {path} cannot be loaded ({why}); {HOW_TO_GET}")]
    Library { path: String, why: String },
    #[error("the RDMA library {path} has no function {function}; {HOW_TO_GET}")]
    Function {
        path: String,
        function: &'static str,
    },
    #[error("the RDMA library cannot report the GID types of {0}; install rdma-core 32 or newer")]
    GidTypes(String),
    #[error("relaxed ordering is not available: the RDMA library has no ibv_reg_mr_iova2")]
    RelaxedOrdering,
    #[error("the provider of {0} lacks post and poll functions: install ibverbs-providers")]
    Operations(String),
    #[error(
        "{}. On the host: is the driver loaded (rdma link; packages rdma-core, ibverbs-providers)? In a container: start it with --device /dev/infiniband --ulimit memlock=-1 --network host, and install ibverbs-providers in it",
        no_device(.0)
    )]
    Device(Vec<String>),
    #[error("no port can be used as a rail: {0}")]
    Rails(String),
    #[error("device {0} does not answer")]
    Silent(String),
    #[error("device {0} was removed")]
    Removed(String),
    #[error("memory is not registered with device {0} yet")]
    Idle(String),
    #[error("port state is {0}")]
    PortState(String),
    #[error("link layer is {0}, not Ethernet")]
    LinkLayer(String),
    #[error(
        "its only GIDs are link-local addresses that its interface {0} does not have: give it an IPv4 address, or link-local: [ipv6] in netplan"
    )]
    Address(String),
    #[error("no RoCE v2 GID: give its interface an IP address")]
    Gid,
    #[error("{rail}: the device allows {most} work requests per QP, {needed} are needed")]
    WorkRequests {
        rail: String,
        most: u32,
        needed: u32,
    },
    #[error("{rail}: the device allows {most} entries per CQ, {needed} are needed")]
    CqEntries {
        rail: String,
        most: u32,
        needed: u32,
    },
    #[error("cannot create queue pairs for {peer}: {rails}")]
    QueuePairs { peer: String, rails: String },
    #[error("no shared subnet or route: this host has {ours}, the peer has {theirs}")]
    Subnet { ours: String, theirs: String },
    #[error(
        "no network interface for connection set-up: NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY exclude all of {0}"
    )]
    Interface(String),
}

fn no_device(failures: &[String]) -> String {
    match failures {
        [] => "no RDMA device found".to_owned(),
        some => format!("cannot open any RDMA device: {}", some.join("; ")),
    }
}

/// System call or verbs call, with its arguments. `hint` is empty, or has a remedy in parentheses.
#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Call {
    #[error("cannot watch for fork() (pthread_atfork)")]
    WatchFork,
    #[error("cannot list the network interfaces (getifaddrs)")]
    ListInterfaces,
    #[error("cannot list RDMA devices with {library}")]
    ListDevices { library: String },
    #[error("cannot open {device}: the device rules of this container leave it out")]
    OpenExcluded { device: String },
    #[error(
        "cannot open {device} (check that /dev/infiniband exists and that this user may open it)"
    )]
    Open { device: String },
    #[error("cannot query {device}")]
    Query { device: String },
    #[error("cannot query {device} port {port}")]
    QueryPort { device: String, port: u8 },
    #[error("cannot read the GID table of {device}")]
    GidTable { device: String },
    #[error("cannot read GID {index} of {device} port {port}")]
    Gid {
        device: String,
        port: u8,
        index: u32,
    },
    #[error("cannot read events of {device}")]
    ReadEvents { device: String },
    #[error("cannot make the event descriptor of {device} non-blocking")]
    NonBlockingEvents { device: String },
    #[error("cannot allocate a protection domain on {device}")]
    AllocatePd { device: String },
    #[error("cannot create a CQ of {entries} entries on {device}{hint}")]
    CreateCq {
        device: String,
        entries: u32,
        hint: String,
    },
    #[error("cannot create a QP of {sends} + {receives} requests on {device}{hint}")]
    CreateQp {
        device: String,
        sends: u32,
        receives: u32,
        hint: String,
    },
    #[error("cannot register {bytes} bytes at {addr:#x} with {device}{hint}")]
    Register {
        device: String,
        addr: usize,
        bytes: usize,
        hint: String,
    },
    #[error("cannot map {0} bytes")]
    Map(usize),
    #[error("cannot move QP {qp} of {device} to {state}")]
    ModifyQp {
        device: String,
        qp: u32,
        state: &'static str,
    },
    #[error("cannot post a write on QP {qp} of {device}")]
    PostWrite { device: String, qp: u32 },
    #[error("cannot post receives on QP {qp} of {device}")]
    PostReceives { device: String, qp: u32 },
    #[error("cannot poll a CQ of {device}")]
    Poll { device: String },
    #[error("cannot connect to {0}")]
    Connect(SocketAddr),
    #[error("cannot listen on {0}")]
    Listen(SocketAddr),
    #[error("cannot set up a bootstrap connection")]
    Bootstrap,
    #[error("cannot set up a TCP stream")]
    Stream,
    #[error("cannot start the service thread")]
    StartService,
    #[error("cannot wake the service thread")]
    WakeService,
}

#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Argument {
    #[error("{0} is NULL")]
    Null(&'static str),
    #[error("{0} is not a pointer that this plugin returned")]
    NotOurs(&'static str),
    #[error("{name} is {found}; it must be {wanted}")]
    Kind {
        name: &'static str,
        found: &'static str,
        wanted: &'static str,
    },
    #[error("ctx is not a context that init returned")]
    Context,
    #[error("device {0} does not exist; the only device is 0")]
    Device(i32),
    #[error("data is NULL and its size is {0} bytes")]
    NullData(usize),
    #[error("size is {0}; it must not be negative")]
    NegativeSize(i32),
    #[error("n is {count}; a receive takes 1 to {most} buffers")]
    Buffers { count: i32, most: usize },
    #[error("group of {count} receives; 1 to {most} are allowed")]
    Group { count: usize, most: usize },
    #[error("request {0} is not in flight")]
    NotInFlight(u16),
    #[error("memory of type {kind} cannot be registered: only host memory (type {host})")]
    MemoryType { kind: i32, host: i32 },
    #[error("cannot register {bytes} bytes at {addr:#x}: data is NULL or the range wraps around")]
    Data { addr: usize, bytes: usize },
    #[error("cannot register {bytes} bytes at {addr:#x}: the range is empty or wraps around")]
    Range { addr: usize, bytes: usize },
    #[error(
        "{call}: the memory at {addr:#x} was registered with a connection that sends; register it with this one"
    )]
    ForSends { call: &'static str, addr: u64 },
    #[error(
        "{call}: {bytes} bytes at {addr:#x} are outside the registered range {start:#x} to {end:#x}"
    )]
    Outside {
        call: &'static str,
        addr: u64,
        bytes: usize,
        start: usize,
        end: usize,
    },
    #[error("send of {bytes} bytes; at most {most} are allowed on this connection")]
    TooLarge { bytes: u64, most: u64 },
    #[error("GID index {0} is above 255")]
    GidIndex(u16),
    #[error("path MTU {0} is not 256, 512, 1024, 2048 or 4096")]
    PathMtu(u32),
    #[error(
        "timeout {timeout}, retry count {retry_count}: the timeout must be 0 to 31 and the retry count 0 to 7"
    )]
    Timing { timeout: u8, retry_count: u8 },
    #[error("{bytes} inline bytes on a QP that takes {most}")]
    Inline { bytes: u32, most: u32 },
    #[error("{count} receives on a QP that holds {most}")]
    Receives { count: usize, most: usize },
    #[error("cannot map a region of 0 bytes")]
    EmptyRegion,
    #[error(
        "NCCL's cost table has {num_algo} algorithms and {num_proto} protocols, this tuner supports {algorithms} and {protocols}: tuner not used; install a plugin made for this NCCL"
    )]
    CostTable {
        num_algo: i32,
        num_proto: i32,
        algorithms: usize,
        protocols: usize,
    },
}

/// Incompatible ends, or a job that is set up wrongly.
#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Usage {
    #[error("called before a successful init")]
    NotInitialised,
    #[error("trafficClass is out of range: 0 to 255, or negative for none")]
    TrafficClass,
    #[error(
        "CUDA device memory cannot be registered: a GB10 has no GPUDirect RDMA; use host memory"
    )]
    CudaMemory,
    #[error("{0}")]
    Handle(String),
    #[error("{peer} refused the connection: {why}")]
    Refused { peer: String, why: String },
    #[error(
        "the tuners of {peer} ({theirs}) and {host} ({ours}) differ, so collectives would hang: use the same NCCL version, NCCL_SPARK_TUNER, NCCL_SPARK_TUNER_TABLE and NCCL_SPARK_LL128 on every node (nccl-spark tune collectives writes the table to all), or set NCCL_SPARK_TUNER=off on every node"
    )]
    Tuners {
        peer: String,
        theirs: String,
        host: String,
        ours: String,
    },
    #[error(
        "NCCL_SPARK_RING_TCP=1 is set on {with} and not on {without}: set it on every node or on none"
    )]
    RingTcp { with: String, without: String },
    #[error(
        "{rails}; if no cable joins them (the diagonal of a ring), order the ranks along the cables and set NCCL_ALGO=Ring, or set NCCL_SPARK_RING_TCP=1 on every node: TCP then connects them"
    )]
    NothingInCommon { rails: String },
    #[error(
        "{rails}; NCCL_SPARK_RING_TCP does not replace rails that may return: {host} cannot use {why}"
    )]
    TcpWithheld {
        rails: String,
        host: String,
        why: String,
    },
    #[error(
        "send of {bytes} bytes into a receive of {room} bytes (tag {tag:#x}, peer {peer}): the ranks disagree on a size"
    )]
    Sizes {
        peer: String,
        bytes: u64,
        room: u64,
        tag: i32,
    },
    #[error("memory was deregistered while a send from it to {peer} was running")]
    DeregisteredSend { peer: String },
    #[error("memory was deregistered while a receive into it from {peer} was running")]
    DeregisteredReceive { peer: String },
    #[error("connection closed while requests were running")]
    ClosedEarly,
    #[error("connection closed")]
    Closed,
}

/// Event on one rail that ends a connection. Boxed to keep [`super::Error`] small.
#[derive(Debug, Clone, PartialEq, Eq, Cause)]
#[error("rail {rail} to {peer} failed: {why} (peer rail {peer_rail}); {lanes}")]
pub struct OnRail {
    pub rail: String,
    pub peer: String,
    pub why: String,
    pub peer_rail: String,
    pub lanes: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Cause)]
#[error("TCP with {peer} over {interface}")]
pub struct TcpPath {
    pub peer: String,
    /// Name of the interface on this host.
    pub interface: String,
}

/// Request that has made no progress. `what` names the request, with an article: "a posted send".
#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Waited {
    #[error("{what} had waited {waited:.1?}")]
    Send {
        what: &'static str,
        waited: Duration,
    },
    #[error("{what} had waited {waited:.1?} ({bytes} bytes)")]
    StreamSend {
        what: &'static str,
        waited: Duration,
        bytes: usize,
    },
    #[error("{what} had waited {waited:.1?} ({pending} receives pending)")]
    Receive {
        what: &'static str,
        waited: Duration,
        pending: usize,
    },
}

/// Reason why no bytes get through. `limit` is a setting's value in seconds.
#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Network {
    #[error("bootstrap connection to {peer} failed: {why}")]
    Bootstrap { peer: String, why: String },
    #[error(
        "cannot reach the peer at {address}: {why}; check NCCL_SOCKET_IFNAME on both hosts, routes and firewalls"
    )]
    Unreachable { address: SocketAddr, why: String },
    #[error("called again for a connection whose set-up has failed or timed out")]
    SetupEnded,
    #[error("the redial listener is on {at}, but this peer reached this host at {own}", own = .own.ip())]
    OtherAddress { at: SocketAddr, own: SocketAddr },
    #[error("{rail} no longer has the agreed address")]
    AddressGone { rail: String },
    #[error(
        "it has no route from {own} to {peer} through {netdev}, although there is one back: add it with ip route add {peer}/{} via \
         NEXT_HOST dev {netdev}",
        if .peer.is_ipv4() { 32 } else { 128 }
    )]
    NoRoute {
        own: IpAddr,
        peer: IpAddr,
        netdev: String,
    },
    #[error("{0}")]
    DeadPath(String),
    #[error("another connection tests this path")]
    PathOnTrial,
    #[error("no usable rail to {peer}: {rails}")]
    NoRail { peer: String, rails: String },
    #[error(
        "no usable rail to {peer} within NCCL_SPARK_CONNECT_TIMEOUT_S={limit}: {tries}; nccl-spark doctor --peer HOST tests each rail"
    )]
    NoFirstRail {
        peer: String,
        limit: u64,
        tries: String,
    },
    #[error(
        "no usable rail to {peer} for {waited:.0?} (NCCL_SPARK_LOSS_TIMEOUT_S={limit}): {rails}; check the cables, and the peer's host and ports"
    )]
    NoRailLeft {
        peer: String,
        waited: Duration,
        limit: u64,
        rails: String,
    },
    #[error(
        "rail {rail} to {peer} lost, and its device did not flush its receive queue: see dmesg"
    )]
    NotFlushed { rail: String, peer: String },
    #[error(transparent)]
    OnRail(Box<OnRail>),
    #[error("{tcp} failed (stream {number}: {why})")]
    Stream {
        tcp: TcpPath,
        number: usize,
        why: String,
    },
    #[error(
        "no answer from {tcp} for {silent:.0?}, the peer's host or the network may be down: {waited}"
    )]
    Silent {
        tcp: TcpPath,
        silent: Duration,
        waited: Waited,
    },
    #[error("{0}; {1}")]
    While(Box<Network>, Waited),
}

#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum PeerGone {
    #[error("{peer} closed the connection: its job has ended or failed, see its log")]
    Closed { peer: String },
    #[error(
        "{peer} is gone: its bootstrap connection closed without BYE, and it answered neither over a rail nor by a new TCP connection; its process has ended, or its host is down"
    )]
    Vanished { peer: String },
    #[error("the connection has failed at {peer}: {why}")]
    Failed { peer: String, why: String },
    #[error("{peer} closed the connection before any rail worked, see its log: {rails}")]
    Left { peer: String, rails: String },
    #[error("{peer} closed the bootstrap connection during connection set-up: see its log")]
    ClosedInSetup { peer: String },
    #[error("bootstrap connection to {peer} failed: {why}")]
    Bootstrap { peer: String, why: String },
    #[error("{tcp} was closed by the peer; {waited}")]
    StreamsClosed { tcp: TcpPath, waited: Waited },
    #[error(
        "{tcp} ended without BYE (stream {number}: {why}): the peer's process has failed or is gone"
    )]
    StreamEnded {
        tcp: TcpPath,
        number: usize,
        why: String,
    },
    #[error("{0}; {1}")]
    While(Box<PeerGone>, Waited),
    #[error("{gone}; {waited}; {lanes}")]
    OnLanes {
        gone: Box<PeerGone>,
        waited: Waited,
        lanes: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Violation {
    #[error("{peer} violated the protocol: {how}; please report it, with the logs of both hosts")]
    Breach { peer: String, how: String },
    #[error(transparent)]
    OnRail(Box<OnRail>),
    #[error("{peer}: {how}")]
    Header { peer: String, how: String },
    #[error("{peer} sent a malformed message: {how}")]
    Malformed { peer: String, how: String },
    #[error("{peer} sent an unexpected {kind} message during connection set-up")]
    Unexpected { peer: String, kind: &'static str },
    #[error("{peer} offered no pair of rails")]
    NoPairs { peer: String },
    #[error("{peer} offered rail {rail}, which this host does not have")]
    UnknownRail { peer: String, rail: usize },
    #[error("{peer} answered for {theirs} rails; {ours} were offered")]
    RailCount {
        peer: String,
        theirs: usize,
        ours: usize,
    },
    #[error("{peer} reports a working rail that this side could not connect")]
    NotConnected { peer: String },
    #[error("{peer} uses streams that are not open")]
    NotOpen { peer: String },
    #[error("the peer sent {theirs} queue pairs; {ours} were agreed")]
    QueuePairs { theirs: usize, ours: usize },
    #[error("the peer asked for path MTU {mtu_bytes} on {rail}, whose port has {most}")]
    PathMtu {
        rail: String,
        mtu_bytes: u32,
        most: u32,
    },
}

/// Step that took too long. `limit` is a setting's value in seconds.
#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum TimedOut {
    #[error(
        "timed out after {waited:.0?} waiting for {what} (NCCL_SPARK_CONNECT_TIMEOUT_S={limit}): see the log of that rank"
    )]
    Setup {
        what: String,
        waited: Duration,
        limit: u64,
    },
    #[error(
        "rail {rail} to {peer} lost, and its device does not stop within NCCL_SPARK_LOSS_TIMEOUT_S={limit}, see dmesg: {rails}"
    )]
    NotStopped {
        rail: String,
        peer: String,
        limit: u64,
        rails: String,
    },
    #[error(
        "{peer} did not acknowledge the loss of rail {rail} within NCCL_SPARK_LOSS_TIMEOUT_S={limit}, see its log and its dmesg: {rails}"
    )]
    NotAcknowledged {
        rail: String,
        peer: String,
        limit: u64,
        rails: String,
    },
    #[error("no progress with {peer} for {waited:.0?} (NCCL_SPARK_STALL_ABORT_S={limit}): {why}")]
    Stalled {
        peer: String,
        waited: Duration,
        limit: u64,
        why: StallCause,
    },
}

/// Cause of a stall. This side asks the peer about its progress. If the peer answers, `idle` is the
/// time since the peer's last progress. If it does not answer, `silent` is the time since the
/// question. In [`StallCause::PeerWaits`], `why` is the cause of the peer's own stall.
#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum StallCause {
    #[error("the peer's rank has posted no receive for {idle:.0?}: {}", late(*.number, *.there))]
    NoReceive {
        idle: Duration,
        number: u64,
        there: Option<Operation>,
    },
    #[error("the peer's rank has posted no send for {idle:.0?}: {}", late(*.number, *.there))]
    NoSend {
        idle: Duration,
        number: u64,
        there: Option<Operation>,
    },
    #[error(
        "the peer's requests are done, and its program has not tested them for {idle:.0?}: it sleeps, or NCCL's proxy thread is stopped"
    )]
    NotTested { idle: Duration },
    #[error(
        "the peer has granted a receive, and the send waits on this host: for another tag, or for a rail"
    )]
    HeldBack,
    #[error("the peer has posted a receive, and its clear-to-send has not arrived here")]
    NoGrantHere,
    #[error("a receive is posted here, and its clear-to-send has not arrived at the peer")]
    NoGrantThere,
    #[error("all data of the peer was acknowledged, and some has not arrived here")]
    NotArrivedHere,
    #[error("all data for the peer was acknowledged, and some has not arrived there")]
    NotArrivedThere,
    #[error(
        "this host's rank has posted no send: it has not entered message {}, for which the peer waits{}{}",
        grouped(*.number), in_operation(*.there), .here.map_or_else(String::new, |here| format!("; this rank is in {here}"))
    )]
    NotSentHere {
        number: u64,
        here: Option<Operation>,
        there: Option<Operation>,
    },
    #[error(
        "the peer waits for data of this host on another connection ({why}), and has made no progress here for {idle:.0?}"
    )]
    PeerWaits {
        why: Box<StallCause>,
        idle: Duration,
    },
    #[error("the peer has not acknowledged the data posted on {rails}")]
    SendNotAcknowledged { rails: String },
    #[error("the peer's data on {rails} is not acknowledged")]
    ReceiveNotAcknowledged { rails: String },
    #[error(
        "the peer has not answered for {silent:.0?}: its process is stopped, or its host or the network is down{}",
        unacknowledged_on(.unacknowledged)
    )]
    NoAnswer {
        silent: Duration,
        unacknowledged: String,
    },
}

/// Describes a rank at the peer that has not entered message `number`, in operation `there`.
fn late(number: u64, there: Option<Operation>) -> String {
    let number = grouped(number);
    let there = there.map_or_else(String::new, |there| format!(", and is in {there}"));
    format!(
        "it has not entered message {number}, which this rank has posted{there}; its GPU or its program is late"
    )
}

/// As in " in AllGather (Ring, Simple)"; empty if NCCL has announced no operation.
pub fn in_operation(operation: Option<Operation>) -> String {
    operation.map_or_else(String::new, |operation| format!(" in {operation}"))
}

/// Returns the number with commas, as in "12,590".
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn unacknowledged_on(rails: &str) -> String {
    if rails.is_empty() {
        String::new()
    } else {
        format!("; data posted on {rails} is not acknowledged")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Cause)]
pub enum Internal {
    #[error("internal error, please report it: {0}")]
    Panic(String),
    #[error("internal error in the service thread: {0}")]
    ServicePanic(String),
    #[error("internal error in a thread that connects or stops queue pairs")]
    WorkerPanic,
    #[error("this connection cannot be used: an earlier call on it panicked")]
    CallPanicked,
    #[error("this connection cannot be used: its data path panicked")]
    PathPanicked,
    #[error("request {number} does not exist: there are {count}")]
    Request { number: u16, count: usize },
    #[error("{device}:{port} disappeared during initialisation")]
    PortGone { device: String, port: u8 },
    #[error("connection set-up has no current stage")]
    NoStage,
    #[error("a rail was neither connected nor left out")]
    NotConnected,
    #[error("a rail was neither tested nor left out")]
    NotTested,
    #[error("no room for a clear-to-send")]
    NoRoomForCts,
    #[error("queue pair {0} has no room for a test write")]
    NoRoomForTest(usize),
    #[error(
        "data of {peer} was acknowledged and never arrived here: a fault of this plugin or of a NIC; please report it, with the logs of both hosts ({rails})"
    )]
    NotArrivedHere { peer: String, rails: String },
    #[error(
        "data for {peer} was acknowledged and never arrived there: a fault of this plugin or of a NIC; please report it, with the logs of both hosts ({rails})"
    )]
    NotArrivedThere { peer: String, rails: String },
    #[error("a listener without a port")]
    NoPort,
    #[error("the kernel mapped memory at address 0")]
    MappedAtZero,
}
