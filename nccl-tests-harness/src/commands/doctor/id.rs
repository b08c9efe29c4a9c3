//! The kinds of findings. Scripts rely on ids, so an id never changes its meaning.

use super::finding::{Finding, Severity};
use std::borrow::Cow;

macro_rules! ids {
    ($($name:ident = $severity:ident $text:literal: $meaning:literal;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Id {
            $(#[doc = $meaning] $name,)*
        }

        impl Id {
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// Makes a finding of the id's usual severity, without a cure.
            pub fn finding(self, text: impl Into<String>) -> Finding {
                let severity = match self {
                    $(Self::$name => Severity::$severity,)*
                };
                Finding { severity, id: Cow::Borrowed(self.text()), text: text.into(), cure: None }
            }
        }

        /// Each id with its meaning, as in the table of docs/guide/troubleshooting.md.
        pub const ALL: &[(&str, &str)] = &[$(($text, $meaning),)*];
    };
}

ids! {
    // The machine.
    NoRdmaDevice = Broken "no-rdma-device": "this host or container shows no RDMA device";
    DevInfiniband = Broken "dev-infiniband": "sysfs shows RDMA devices, and `/dev/infiniband` is not there";
    DeviceFile = Broken "device-file": "one device's file is missing below `/dev/infiniband`";
    DevicePermissions = Broken "device-permissions": "this user may not open a device's file";
    DeviceForbidden = Broken "device-forbidden": "the container's rules forbid a device (EPERM)";
    RdmaDriver = Broken "rdma-driver": "a NIC is present without an RDMA device: `mlx5_ib` is not loaded";
    Verbs = Broken "verbs": "libibverbs is installed and cannot be used";
    Memlock = Fragile "memlock": "locked memory is limited";
    CmaRegression = Broken "cma-regression": "the kernel's contiguous memory is broken, and registering fails with ENOMEM";
    Hotplug = Fragile "hotplug": "DGX OS's hotplug handler takes all four functions away when one cable is pulled";
    PeermemAtBoot = Note "peermem-at-boot": "nvidia-peermem is to be loaded at boot, which fails on a Spark";
    PeermemLoaded = Note "peermem-loaded": "nvidia-peermem is loaded, and nothing uses it";
    OneProcessor = Slow "one-processor": "the process may run only on one processor";
    SlowProcessors = Slow "slow-processors": "the process may run only on slow processors";
    DeepIdle = Note "deep-idle": "processors may sleep so deeply that waking takes longer than a small all-reduce";
    NoRail = Broken "no-rail": "no port can be used as a rail";
    HalfCable = Slow "half-cable": "one of the two functions of a cable is not used";
    HcaFilterOneLink = Slow "hca-filter-one-link": "`NCCL_IB_HCA` names two functions of one PCIe link";
    HcaFilterEmpty = Broken "hca-filter-empty": "`NCCL_IB_HCA` admits no device of this host";
    HcaFilterUnusable = Fragile "hca-filter-unusable": "`NCCL_IB_HCA` names a port that cannot be used";
    SlowPcieLink = Slow "slow-pcie-link": "a PCIe link has fewer lanes or a lower generation than it could";
    UnknownWiring = Fragile "unknown-wiring": "sysfs does not show a device, so its PCIe link and cable are unknown";
    UnknownSpeed = Note "unknown-speed": "a port reports no speed";
    SmallMtu = Slow "small-mtu": "the interface's MTU makes a path MTU below 4096 bytes";
    UnequalMtus = Slow "unequal-mtus": "the rails of this host have different MTUs";
    SharedSubnet = Fragile "shared-subnet": "rails of this host are in one subnet";
    Arp = Fragile "arp": "rails of this host answer ARP requests for each other";
    LinkLocalOnly = Note "link-local-only": "a rail has link-local addresses alone, and its twin has IPv4";
    SubnetClash = Fragile "subnet-clash": "an interface that is no rail is in a rail's subnet";
    AutomaticProfile = Fragile "automatic-profile": "NetworkManager's automatic profile keeps a rail's interface on DHCP";
    SocketIfname = Broken "socket-ifname": "`NCCL_SOCKET_IFNAME` leaves no interface that is up";
    PciePayload = Slow "pcie-payload": "PCIe transactions are smaller than on other Sparks";
    PcieReadRequest = Slow "pcie-read-request": "PCIe read requests are smaller than on other Sparks";
    PcieUncorrected = Fragile "pcie-uncorrected": "a PCIe link has had errors that were not corrected";
    PcieCorrected = Fragile "pcie-corrected": "a PCIe link has corrected many errors";
    PcieLog = Fragile "pcie-log": "the kernel log has lines about uncorrected PCIe errors of the NIC or of the ports above it";
    NoPause = Fragile "no-pause": "pause frames are off";
    UnprotectedPriority = Fragile "unprotected-priority": "RoCE has a priority without PFC, and PFC is on for another";
    QosUntilReboot = Fragile "qos-until-reboot": "PFC and trust mode are set, and nothing sets them at boot";
    FirmwareDiffers = Fragile "firmware-differs": "the functions run different firmware";
    FunctionsAbsent = Note "functions-absent": "fewer than four functions are present";
    Retransmissions = Fragile "retransmissions": "a rail has sent packets again";
    OutOfSequence = Fragile "out-of-sequence": "packets were lost on the way to a rail";
    Congestion = Fragile "congestion": "a rail was slowed by congestion notifications";
    LinkErrors = Fragile "link-errors": "a rail has seen errors on the wire";
    ReceiverNotReady = Fragile "receiver-not-ready": "messages came for which no receive was posted";
    Discards = Fragile "discards": "a rail has dropped packets before sending them";
    FlappingLink = Fragile "flapping-link": "a rail's link has gone down often";
    // Libraries.
    Libibverbs = Broken "libibverbs": "`libibverbs.so.1` is not where the loader looks";
    Mlx5Provider = Broken "mlx5-provider": "libibverbs has no provider for mlx5";
    Glibc = Broken "glibc": "the plugin's file needs a newer glibc than is installed";
    NcclBadBuild = Fragile "nccl-bad-build": "an NCCL that is known to stop after a while on Arm";
    NcclNvls = Fragile "nccl-nvls": "NCCL 2.30.4, whose NVLS fails on Sparks";
    NcclTooOld = Broken "nccl-too-old": "an NCCL so old that the plugin has none of its interfaces";
    NcclUnknownBuild = Note "nccl-unknown-build": "a build of NCCL with few reports from Sparks";
    NcclUnknown = Note "nccl-unknown": "a libnccl that does not say its version";
    NcclUnreadable = Note "nccl-unreadable": "a libnccl that cannot be read";
    NcclSeveral = Fragile "nccl-several": "several NCCLs, or variables that choose one";
    NcclNotLoaded = Note "nccl-not-loaded": "the process has not loaded NCCL";
    OtherPlugin = Broken "other-plugin": "NCCL loads another network plugin";
    PluginNotLoaded = Broken "plugin-not-loaded": "a process has NCCL and no network plugin";
    PluginCopies = Fragile "plugin-copies": "several copies of this plugin";
    // Variables.
    NetworkNotSpark = Broken "network-not-spark": "`NCCL_NET` names another network";
    PluginKeptOut = Broken "plugin-kept-out": "`NCCL_NET_PLUGIN` keeps NCCL from loading the plugin";
    PluginNotFirst = Fragile "plugin-not-first": "`NCCL_NET_PLUGIN` names another plugin first";
    PluginNotNamed = Note "plugin-not-named": "no variable names the plugin";
    SettingRefused = Broken "setting-refused": "a setting has a value with which the plugin does not start";
    IbDisable = Fragile "ib-disable": "`NCCL_IB_DISABLE=1`, and RDMA is used all the same";
    GidIndexPinned = Fragile "gid-index-pinned": "`NCCL_IB_GID_INDEX` is fixed";
    RoceVersion = Fragile "roce-version": "`NCCL_IB_ROCE_VERSION_NUM` asks for another RoCE than v2";
    SlowFailover = Fragile "slow-failover": "the plugin notices a dead rail late, or gives a rail up after few lost packets";
    OtherTuner = Note "other-tuner": "another tuner takes the place of the plugin's";
    FewChannels = Note "few-channels": "`NCCL_MAX_NCHANNELS` leaves the tuner too few channels";
    Launcher = Note "launcher": "the variables are as a known launcher sets them";
    // Two hosts.
    PeerVersion = Fragile "peer-version": "the hosts have different versions of `nccl-spark`";
    PeerPlugin = Fragile "peer-plugin": "the hosts have different builds of the plugin";
    PeerPluginMissing = Broken "peer-plugin-missing": "one host has no plugin";
    PeerNccl = Fragile "peer-nccl": "the hosts have different versions of NCCL";
    PeerNcclBuild = Note "peer-nccl-build": "the hosts have different builds of one version of NCCL";
    PeerTuner = Broken "peer-tuner": "the tuners of the hosts decide differently";
    PeerSettings = Fragile "peer-settings": "a variable differs that must be the same on both hosts";
    NoCommonSubnet = Broken "no-common-subnet": "no rail of one host shares a subnet with one of the other, or has a route to one";
    PeerPriority = Fragile "peer-priority": "the two ends of a path have different priorities or PFC";
    PeerMtu = Slow "peer-mtu": "the two ends of a path have different MTUs";
    SwitchMtu = Slow "switch-mtu": "a switch between two ports drops packets that both ports could send";
    PeerHalfCable = Slow "peer-half-cable": "one function of a cable has no counterpart on the other host";
    AsymmetricCabling = Note "asymmetric-cabling": "a cable leads from p0 to p1";
    ArpAnsweredByAnother = Fragile "arp-answered-by-another": "a host's ARP table gives a rail another function's hardware address";
    ArpForeign = Fragile "arp-foreign": "a host has the hardware address of another host for a rail";
    PairUnreachable = Slow "pair-unreachable": "a pair of rails delivers no packets";
    WrongBytes = Broken "wrong-bytes": "bytes arrived wrong";
    SlowRail = Slow "slow-rail": "one rail is slow and others are not, though its attributes are right";
    SlowPath = Slow "slow-path": "a pair of rails is slow, and no other pair is much faster";
    SlowMerged = Slow "slow-merged": "each rail is fast, and all together are slow";
    FairRail = Note "fair-rail": "a pair of rails carries 80 to 90 % of what it should";
    PeerLost = Broken "peer-lost": "the partner ended before all rail pairs were measured";
}
