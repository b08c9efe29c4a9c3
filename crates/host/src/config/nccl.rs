//! Variables of NCCL's own transports that this plugin does not read, each with the reason.
//! `nccl-spark doctor`, the documents and the log show the reasons. The sources of NCCL 2.27.3 to
//! 2.32.3 read these variables with `NCCL_PARAM` and `ncclGetEnv`, in NCCL's own transports and
//! where NCCL chooses networks and GPUs. Variables that the plugin reads are only in the table of
//! settings.

/// Returns the ignored variables, each with the reason.
pub fn ignored() -> impl Iterator<Item = (&'static str, &'static str)> {
    IGNORED
        .iter()
        .flat_map(|(names, why)| names.iter().map(|name| (*name, *why)))
}

macro_rules! ignored {
    ($([$($name:literal),* $(,)?] => $why:literal;)*) => { static IGNORED: &[(&[&str], &str)] = &[$((&[$($name),*], $why),)*]; };
}

ignored! {
    ["NCCL_IB_DISABLE"] =>
        "it turns off NCCL's own IB transport alone; NCCL_NET=Socket makes NCCL use sockets";
    ["NCCL_IB_MERGE_NICS", "NCCL_IB_MERGE_VFS", "NCCL_IB_SORT_MERGE_NICS"] =>
        "the plugin merges the rails itself, and shows NCCL one device";
    ["NCCL_NET_MERGE_LEVEL", "NCCL_NET_MERGE_POLICY", "NCCL_NET_FORCE_MERGE"] =>
        "NCCL sees one device, so there is nothing to merge";
    ["NCCL_IB_SUBNET_AWARE_ROUTING"] =>
        "rails are always paired by their subnets";
    ["NCCL_IB_SUBNET_PREFIX_LEN"] =>
        "the length of a subnet's prefix is read from the interface";
    ["NCCL_IB_ADDR_FAMILY"] =>
        "addresses are chosen by the subnets that both ends have: IPv4, then routable IPv6, then link-local";
    ["NCCL_IB_ADDR_RANGE"] =>
        "addresses are chosen by the subnets that both ends have; NCCL_IB_HCA leaves ports out";
    ["NCCL_IB_ROCE_VERSION_NUM"] =>
        "only RoCE v2 is used: value 2, which is also NCCL's default";
    ["NCCL_IB_ROUTABLE_FLID_GID_INDEX"] =>
        "it is for InfiniBand, and rails are Ethernet";
    ["NCCL_IB_PKEY", "NCCL_IB_PKEY_VALUE"] =>
        "queue pairs use entry 0 of the partition table, the only one that RoCE has by default";
    ["NCCL_IB_SPLIT_DATA_ON_QPS"] =>
        "a message is split in proportion to the rails' rates";
    ["NCCL_IB_USE_INLINE"] =>
        "messages of up to 128 bytes are always sent inline";
    ["NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS"] =>
        "receives are always posted in advance";
    ["NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME"] =>
        "receives are matched by this plugin's own protocol";
    ["NCCL_IB_FIFO_TC"] =>
        "clear-to-send writes have the traffic class of the data, NCCL_IB_TC";
    ["NCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_AR_THRESHOLD", "NCCL_IB_OOO_RQ"] =>
        "each part of a message is one write with immediate, which completes after all of its packets";
    ["NCCL_IB_ECE_ENABLE"] =>
        "enhanced connection establishment is not negotiated";
    ["NCCL_IB_DATA_DIRECT"] =>
        "it is for GPU memory, and the plugin moves host memory";
    ["NCCL_IB_DEVICE_PCI_ORDER"] =>
        "rails are ordered by cable and PCIe domain";
    ["NCCL_IB_QUERY_PORT_SPEED"] =>
        "a port's speed is always read";
    ["NCCL_IB_WARN_RAIL_LOCAL"] =>
        "rails are paired by subnet, and a WARN says which are left out";
    [
        "NCCL_IB_RAIL_POLICY",
        "NCCL_IB_VR_RAILS_PER_SOCKET",
        "NCCL_IB_VR_SOCKET_COUNT",
    ] => "rails are paired by subnet and cable";
    ["NCCL_IB_EVENT_BASED_LB", "NCCL_IB_EVENT_BASED_LB_REMOTE"] =>
        "shares follow the rails' measured rates";
    ["NCCL_IB_WQE_LATENCY_REPORT", "NCCL_IB_WQE_LATENCY_THRESHOLD_NS"] =>
        "nccl-spark top shows the rails' latencies, and a WARN names the rail of a stall";
    ["NCCL_IB_RETURN_ASYNC_EVENTS"] =>
        "events of ports and devices are always read";
    ["NCCL_IB_MQP_RETRY_ALL", "NCCL_IB_MQP_RETRY_CNT", "NCCL_IB_MQP_RETRY_SLEEP_MSEC"] =>
        "connecting a queue pair is retried for up to NCCL_SPARK_CONNECT_TIMEOUT_S; NCCL tries 34 times by default, in about 90 s";
    [
        "NCCL_IB_RESILIENCY_PORT_FAILOVER",
        "NCCL_IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS",
        "NCCL_IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX",
        "NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY",
    ] => "the plugin moves work from lost rails to others and takes them back by itself (NCCL_SPARK_LOSS_TIMEOUT_S)";
    [
        "NCCL_IB_CUDA_SUPPORT",
        "NCCL_GDR_FLUSH_DISABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NET_GDR_READ",
        "NCCL_NET_GDR_C2C",
        "NCCL_NET_GDR_MLOPART",
        "NCCL_DMABUF_ENABLE",
        "NCCL_GDRCOPY_ENABLE",
    ] => "it is for GPUDirect RDMA, and the plugin tells NCCL to give it host memory only: a Spark's NIC cannot reach GPU memory";
    ["NCCL_CROSS_NIC", "NCCL_NETDEVS_POLICY"] =>
        "NCCL sees one device, so every channel has the same network";
    ["NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_INLINE", "NCCL_SOCKET_MIN_TASKSIZE"] =>
        "it is for NCCL's socket transport";
}
