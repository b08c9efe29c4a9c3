//! What kinds of findings there are, each with an id. Scripts rely on ids: one keeps its meaning, and goes away only with it.

macro_rules! ids {
    ($($name:ident = $text:literal: $meaning:literal;)*) => {
        /// A kind of finding.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Id {
            $(#[doc = $meaning] $name,)*
        }

        impl Id {
            /// The id as the text and JSON have it.
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }

        /// Each id with its meaning: the table of docs/guide/troubleshooting.md.
        pub const ALL: &[(&str, &str)] = &[$(($text, $meaning),)*];
    };
}

ids! {
    // The machine.
    NoRdmaDevice = "no-rdma-device": "this host or container shows no RDMA device";
    DevInfiniband = "dev-infiniband": "sysfs shows RDMA devices, and `/dev/infiniband` is not there";
    DeviceFile = "device-file": "one device's file is missing below `/dev/infiniband`";
    DevicePermissions = "device-permissions": "this user may not open a device's file";
    DeviceForbidden = "device-forbidden": "the container's rules forbid a device (EPERM)";
    RdmaDriver = "rdma-driver": "a NIC is there without an RDMA device: `mlx5_ib` is not loaded";
    Verbs = "verbs": "libibverbs is there and cannot be used";
    Memlock = "memlock": "locked memory is limited";
    CmaRegression = "cma-regression": "the kernel's contiguous memory is broken, and registering fails with ENOMEM";
    Hotplug = "hotplug": "DGX OS's hotplug handler takes all four functions away when one cable is pulled";
    PeermemAtBoot = "peermem-at-boot": "nvidia-peermem is to be loaded at boot, which fails on a Spark";
    PeermemLoaded = "peermem-loaded": "nvidia-peermem is loaded, and nothing uses it";
    OneProcessor = "one-processor": "the process may use one processor alone";
    SlowProcessors = "slow-processors": "the process may use the slow processors alone";
    DeepIdle = "deep-idle": "processors may sleep so deeply that waking takes longer than a small all-reduce";
    NoRail = "no-rail": "no port can be used as a rail";
    HalfCable = "half-cable": "one of the two functions of a cable is not used";
    HcaFilterOneLink = "hca-filter-one-link": "`NCCL_IB_HCA` names two functions of one PCIe link";
    HcaFilterEmpty = "hca-filter-empty": "`NCCL_IB_HCA` admits no device of this host";
    HcaFilterUnusable = "hca-filter-unusable": "`NCCL_IB_HCA` names a port that cannot be used";
    SlowPcieLink = "slow-pcie-link": "a PCIe link has fewer lanes or a lower generation than it could";
    UnknownWiring = "unknown-wiring": "sysfs does not show a device, so its PCIe link and cable are unknown";
    UnknownSpeed = "unknown-speed": "a port reports no speed";
    SmallMtu = "small-mtu": "the interface's MTU makes a path MTU below 4096 bytes";
    UnequalMtus = "unequal-mtus": "the rails of this host have different MTUs";
    SharedSubnet = "shared-subnet": "rails of this host are in one subnet";
    Arp = "arp": "rails of this host answer ARP requests for each other";
    LinkLocalOnly = "link-local-only": "a rail has link-local addresses alone, and its twin has IPv4";
    SubnetClash = "subnet-clash": "an interface that is no rail is in a rail's subnet";
    AutomaticProfile = "automatic-profile": "NetworkManager's automatic profile keeps a rail's interface on DHCP";
    SocketIfname = "socket-ifname": "`NCCL_SOCKET_IFNAME` leaves no interface that is up";
    PciePayload = "pcie-payload": "PCIe transactions are smaller than on other Sparks";
    PcieReadRequest = "pcie-read-request": "PCIe read requests are smaller than on other Sparks";
    PcieUncorrected = "pcie-uncorrected": "a PCIe link has had errors that were not corrected";
    PcieCorrected = "pcie-corrected": "a PCIe link has corrected many errors";
    PcieLog = "pcie-log": "the kernel log has lines about uncorrected PCIe errors of the NIC or of the ports above it";
    NoPause = "no-pause": "pause frames are off";
    FirmwareDiffers = "firmware-differs": "the functions run different firmware";
    FunctionsAbsent = "functions-absent": "fewer than four functions are there";
    Retransmissions = "retransmissions": "a rail has sent packets again";
    OutOfSequence = "out-of-sequence": "packets were lost on the way to a rail";
    Congestion = "congestion": "a rail was slowed by congestion notifications";
    LinkErrors = "link-errors": "a rail has seen errors on the wire";
    ReceiverNotReady = "receiver-not-ready": "messages came for which no receive was posted";
    Discards = "discards": "a rail has dropped packets before sending them";
    FlappingLink = "flapping-link": "a rail's link has gone down often";
    // Libraries.
    Libibverbs = "libibverbs": "`libibverbs.so.1` is not where the loader looks";
    Mlx5Provider = "mlx5-provider": "libibverbs has no provider for mlx5";
    Glibc = "glibc": "the plugin's file needs a newer glibc than is there";
    NcclBadBuild = "nccl-bad-build": "an NCCL that is known to stop after a while on Arm";
    NcclNvls = "nccl-nvls": "NCCL 2.30.4, whose NVLS fails on Sparks";
    NcclTooOld = "nccl-too-old": "an NCCL without an interface that the plugin has";
    NcclUnknownBuild = "nccl-unknown-build": "a build of NCCL of which nothing is known";
    NcclUnknown = "nccl-unknown": "a libnccl that does not say its version";
    NcclUnreadable = "nccl-unreadable": "a libnccl that cannot be read";
    NcclSeveral = "nccl-several": "several NCCLs, or variables that choose one";
    NcclNotLoaded = "nccl-not-loaded": "the process has not loaded NCCL";
    OtherPlugin = "other-plugin": "NCCL loads another network plugin";
    PluginNotLoaded = "plugin-not-loaded": "a process has NCCL and no network plugin";
    PluginCopies = "plugin-copies": "several copies of this plugin";
    // Variables.
    NetworkNotSpark = "network-not-spark": "`NCCL_NET` names another network";
    PluginKeptOut = "plugin-kept-out": "`NCCL_NET_PLUGIN` keeps the plugin out";
    PluginNotFirst = "plugin-not-first": "`NCCL_NET_PLUGIN` names another plugin first";
    PluginNotNamed = "plugin-not-named": "no variable names the plugin";
    SettingRefused = "setting-refused": "a setting has a value with which the plugin does not start";
    IbDisable = "ib-disable": "`NCCL_IB_DISABLE=1`, and RDMA is used all the same";
    GidIndexPinned = "gid-index-pinned": "`NCCL_IB_GID_INDEX` is fixed";
    RoceVersion = "roce-version": "`NCCL_IB_ROCE_VERSION_NUM` asks for another RoCE than v2";
    SlowFailover = "slow-failover": "time-out and retries make the loss of a rail slow, or hasty";
    OtherTuner = "other-tuner": "another tuner takes the place of the plugin's";
    FewChannels = "few-channels": "`NCCL_MAX_NCHANNELS` leaves the tuner too few channels";
    Launcher = "launcher": "a launcher that is known sets such variables";
    // Two hosts.
    PeerVersion = "peer-version": "the hosts have different versions of `nccl-spark`";
    PeerPlugin = "peer-plugin": "the hosts have different builds of the plugin";
    PeerPluginMissing = "peer-plugin-missing": "one host has no plugin";
    PeerNccl = "peer-nccl": "the hosts have different versions of NCCL";
    PeerNcclBuild = "peer-nccl-build": "the hosts have different builds of one version of NCCL";
    PeerTuner = "peer-tuner": "the tuners of the hosts decide differently";
    PeerSettings = "peer-settings": "a variable that has to agree differs";
    NoCommonSubnet = "no-common-subnet": "no rail of one host shares a subnet with one of the other";
    PeerMtu = "peer-mtu": "the two ends of a path have different MTUs";
    SwitchMtu = "switch-mtu": "a switch between two ports drops packets that both ports could send";
    PeerHalfCable = "peer-half-cable": "one function of a cable has no counterpart on the other host";
    AsymmetricCabling = "asymmetric-cabling": "a cable leads from p0 to p1";
    ArpAnsweredByAnother = "arp-answered-by-another": "a host has the hardware address of another function for a rail";
    ArpForeign = "arp-foreign": "a host has a stranger's hardware address for a rail";
    PairUnreachable = "pair-unreachable": "a pair of rails carries nothing";
    WrongBytes = "wrong-bytes": "bytes arrived wrong";
    SlowRail = "slow-rail": "one rail is slow and others are not, though its attributes are right";
    SlowPath = "slow-path": "a pair of rails is slower than it should be, as the others are";
    SlowMerged = "slow-merged": "each rail is fast, and all together are slow";
    FairRail = "fair-rail": "a pair of rails carries 80 to 90 % of what it should";
    PeerLost = "peer-lost": "the partner ended before all was measured";
}
