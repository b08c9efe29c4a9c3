//! Injects one fault at a time into a healthy machine. The doctor must find and name the fault,
//! with its cure. On a healthy machine it must find nothing. A test compares the table of faults
//! with faults.md.

use super::bed::{Bed, KERNEL_LOG, LIB, Object, addresses, link};
use crate::commands::doctor::finding::{Finding, Severity, Verdict};
use crate::commands::doctor::judge::{self, JobFacts};
use crate::commands::doctor::look::{self, Facts};
use crate::commands::doctor::place::Place;
use nccl_net_spark::rails::{Warning, WarningKind};

pub(super) struct Fault {
    pub(super) name: &'static str,
    plant: fn() -> Bed,
    pub(super) severity: Severity,
    pub(super) id: &'static str,
    words: &'static [&'static str],
    cure: &'static str,
}

fn one() -> Bed {
    Bed::spark(&["p0"])
}

fn two() -> Bed {
    Bed::spark(&["p0", "p1"])
}

fn with(mut bed: Bed, plant: impl FnOnce(&mut Bed)) -> Bed {
    plant(&mut bed);
    bed
}

use Severity::{Broken, Fragile, Note, Slow};

macro_rules! faults {
    ($($name:literal: $plant:expr => $severity:ident $id:literal [$($word:literal),*] $cure:literal;)*) => {
        pub(super) const FAULTS: &[Fault] = &[$(Fault {
            name: $name, plant: || $plant, severity: $severity, id: $id, words: &[$($word),*], cure: $cure,
        },)*];
    };
}

faults! {
    "no RDMA device on a host": Bed::plain() => Broken "no-rdma-device" [] "modprobe mlx5_ib";
    "no RDMA device in a container": with(Bed::plain(), |bed| bed.write(".dockerenv", "")) => Broken "no-rdma-device" [] "--for docker";
    "a container without /dev/infiniband": Bed::container() => Broken "dev-infiniband" ["/dev/infiniband"] "--for docker";
    "a device file is closed to this user": with(one(), |bed| bed.write("answers/open/uverbs0", "EACCES")) =>
        Slow "device-permissions" ["/dev/infiniband/uverbs0", "rocep1s0f0"] "chmod a+rw /dev/infiniband/uverbs0";
    "a device that the container's rules forbid": with(one(), |bed| bed.write("answers/open/uverbs2", "EPERM")) =>
        Slow "device-forbidden" ["uverbs2", "roceP2p1s0f0", "EPERM"] "--for docker";
    "all device files are closed": with(one(), |bed| (0..4).for_each(|at| bed.write(&format!("answers/open/uverbs{at}"), "EACCES"))) =>
        Broken "device-permissions" ["uverbs3"] "chmod";
    "a device file is missing": with(one(), |bed| bed.remove("dev/infiniband/uverbs0")) => Slow "device-file" ["uverbs0"] "ib_uverbs";
    "the RDMA driver is not loaded": with(one(), |bed| {
        bed.write("sys/bus/pci/devices/0003:01:00.0/vendor", "0x15b3\n");
        bed.write("sys/bus/pci/devices/0003:01:00.0/class", "0x020000\n");
    }) => Broken "rdma-driver" ["0003:01:00.0"] "modprobe mlx5_ib";
    "locked memory limited to 8 MiB": with(one(), |bed| bed.replace("proc/self/limits", "unlimited  ", "8388608    ")) =>
        Broken "memlock" ["8 MB", "1040 MB over 2 rails"] "memlock unlimited";
    "locked memory limited to 16 GiB": with(one(), |bed| bed.replace("proc/self/limits", "unlimited  ", "17179869184")) =>
        Fragile "memlock" ["17179 MB", "1849 MB with 32"] "memlock unlimited";
    "kernel with the CMA regression": with(one(), |bed| {
        bed.write("proc/meminfo", "CmaTotal:       0 kB\nCmaFree:        1200 kB\n");
        bed.write("proc/sys/kernel/osrelease", "7.0.0-1019-nvidia\n");
    }) => Broken "cma-regression" ["7.0.0-1019-nvidia", "CmaFree 1200"] "kho=off";
    "hotplug marker": with(one(), |bed| {
        bed.write("etc/nvidia/cx7-hotplug-enabled", "");
        bed.write("sys/devices/platform/MTKP0001:00/pcie_hotplug/hotplug_enabled", "1\n");
    }) => Fragile "hotplug" ["/etc/nvidia/cx7-hotplug-enabled"] "mv /etc/nvidia/cx7-hotplug-enabled";
    "hotplug handler on until the next boot":
        with(one(), |bed| bed.write("sys/devices/platform/MTKP0001:00/pcie_hotplug/hotplug_enabled", "1\n")) =>
        Fragile "hotplug" ["until the next boot"] "reboot";
    "nvidia-peermem loaded at boot": with(one(), |bed| bed.write("etc/modules-load.d/nv.conf", "nvidia-peermem\n")) =>
        Note "peermem-at-boot" ["/etc/modules-load.d/nv.conf"] "sed";
    "nvidia-peermem loaded": with(one(), |bed| bed.write("proc/modules", "nvidia_peermem 16384 0 - Live 0x0\n")) =>
        Note "peermem-loaded" ["nvidia-peermem"] "modprobe -r";
    "bound to one processor": with(one(), |bed| bed.replace("proc/self/status", "0-19", "0")) => Slow "one-processor" ["processor 0"] "--bind-to none";
    "bound to the slow processors": with(one(), |bed| bed.replace("proc/self/status", "0-19", "0-4,10-14")) =>
        Slow "slow-processors" [] "taskset -c 5-9,15-19";
    "a deep idle state": with(one(), |bed| {
        for (file, text) in [("name", "C3\n"), ("latency", "900\n"), ("disable", "0\n")] {
            bed.write(&format!("sys/devices/system/cpu/cpu0/cpuidle/state1/{file}"), text);
        }
    }) => Note "deep-idle" ["C3", "900 us"] "NCCL_SPARK_CPU_LATENCY_US";
    "no cable": Bed::spark(&[]) => Broken "no-rail" ["rocep1s0f0", "no cable"] "ip link set enp1s0f0np0 up";
    "the twin's interface is down": with(one(), |bed| bed.port("roceP2p1s0f0", "state", "1: DOWN\n")) =>
        Slow "half-cable" ["rocep1s0f0", "roceP2p1s0f0"] "ip link set enP2p1s0f0np0 up";
    "the twin has no address": with(one(), |bed| (0..4).for_each(|at| {
        bed.port("roceP2p1s0f0", &format!("gids/{at}"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
    })) => Slow "half-cable" ["roceP2p1s0f0", "a subnet of its own"] "";
    "two functions of one link selected": with(two(), |bed| bed.set("NCCL_IB_HCA", "rocep1s0f0,rocep1s0f1")) =>
        Slow "hca-filter-one-link" ["rocep1s0f0 and rocep1s0f1", "excludes roceP2p1s0f0"] "unset NCCL_IB_HCA";
    "a filter that admits nothing": with(one(), |bed| bed.set("NCCL_IB_HCA", "mlx5_7")) => Broken "hca-filter-empty" ["NCCL_IB_HCA"] "unset NCCL_IB_HCA";
    "a filter that names a dead port": with(one(), |bed| bed.set("NCCL_IB_HCA", "=rocep1s0f0,roceP2p1s0f0,rocep1s0f1")) =>
        Fragile "hca-filter-unusable" ["rocep1s0f1"] "unset NCCL_IB_HCA";
    "a PCIe link of two lanes": with(one(), |bed| bed.pci("rocep1s0f0", "current_link_width", "2\n")) => Slow "slow-pcie-link" ["Gen5 x2", "Gen5 x4"] "fwupdmgr";
    "a PCIe link at generation 4": with(one(), |bed| bed.pci("roceP2p1s0f0", "current_link_speed", "16.0 GT/s PCIe\n")) =>
        Slow "slow-pcie-link" ["Gen4 x4"] "fwupdmgr";
    "a PCIe payload of 128 bytes": with(one(), |bed| bed.transactions("rocep1s0f0", 0, 2)) => Slow "pcie-payload" ["rocep1s0f0", "128"] "fwupdmgr";
    "a PCIe read request of 256 bytes": with(one(), |bed| bed.transactions("rocep1s0f0", 2, 1)) =>
        Slow "pcie-read-request" ["rocep1s0f0", "256"] "fwupdmgr";
    "corrected PCIe errors": with(one(), |bed| bed.pci("rocep1s0f0", "aer_dev_correctable", "TOTAL_ERR_COR 5000\n")) =>
        Fragile "pcie-corrected" ["rocep1s0f0 (0000:01:00.0)", "5000 corrected"] "dmesg";
    "an uncorrected PCIe error at the root port": with(one(), |bed| {
        bed.write("sys/devices/pci0002:00/0002:00:00.0/aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 1\n");
    }) => Fragile "pcie-uncorrected" ["port 0002:00:00.0", "above roceP2p1s0f0 and roceP2p1s0f1", "0 fatal and 1 other"] "dmesg";
    "a fatal PCIe error of a function": with(one(), |bed| bed.pci("rocep1s0f0", "aer_dev_fatal", "TOTAL_ERR_FATAL 1\n")) =>
        Fragile "pcie-uncorrected" ["rocep1s0f0 (0000:01:00.0)", "1 fatal"] "dmesg";
    "fatal PCIe errors in the kernel log": with(one(), |bed| bed.write("dev/kmsg", &format!("{KERNEL_LOG}\
3,993,9134567,-;pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:01:00.0
 SUBSYSTEM=pci
3,994,9134600,-;mlx5_core 0000:01:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer, (Requester ID)
3,999,9934567,-;pcieport 0000:00:00.0: AER: device recovery failed
"))) => Fragile "pcie-log" ["3 lines", "pcieport 0000:00:00.0: AER: device recovery failed"] "reboot";
    "pause frames off": with(one(), |bed| bed.replace("answers/ethtool-a/enp1s0f0np0", "RX:\t\ton\nTX:\t\ton", "RX:\t\toff\nTX:\t\toff")) =>
        Fragile "no-pause" ["enp1s0f0np0"] "ethtool -A enp1s0f0np0 rx on tx on";
    "PFC for another priority, trust PCP": with(one(), |bed| {
        bed.mlnx_qos("pcp", "0   0   0   1   0   0   0   0");
        bed.qos_unit();
    }) => Fragile "unprotected-priority" ["rocep1s0f0 and roceP2p1s0f0", "priority 0", "for 3 alone"]
        "sudo dcb app replace dev enp1s0f0np0 dscp-prio 26:3 && sudo dcb app replace dev enP2p1s0f0np0 dscp-prio 26:3 && export NCCL_IB_TC=106";
    "PFC for another priority, trust DSCP": with(one(), |bed| {
        bed.mlnx_qos("dscp", "0   0   0   0   0   1   0   0");
        bed.qos_unit();
        bed.set("NCCL_IB_TC", "106");
    }) => Fragile "unprotected-priority" ["priority 3", "for 5 alone"] "export NCCL_IB_TC=162";
    "PFC that nothing sets at boot": with(one(), |bed| {
        bed.mlnx_qos("dscp", "0   0   0   1   0   0   0   0");
        bed.set("NCCL_IB_TC", "106");
    }) => Fragile "qos-until-reboot" ["enp1s0f0np0 and enP2p1s0f0np0"] "nccl-spark env --for systemd | sudo sh";
    "one function with other firmware": with(one(), |bed| bed.write("sys/class/infiniband/rocep1s0f1/fw_ver", "28.43.1000\n")) =>
        Fragile "firmware-differs" ["28.43.1000 (rocep1s0f1)"] "fwupdmgr";
    "an interface MTU of 1500 on all rails": with(one(), |bed| {
        for name in ["enp1s0f0np0", "enP2p1s0f0np0"] {
            bed.write(&format!("sys/class/net/{name}/mtu"), "1500\n");
        }
    }) => Slow "small-mtu" ["enp1s0f0np0", "1024"] "ip link set enp1s0f0np0 mtu 9000";
    "an MTU that differs": with(one(), |bed| bed.write("sys/class/net/enP2p1s0f0np0/mtu", "1500\n")) => Slow "unequal-mtus" [] "mtu 9000";
    "twins in one subnet": with(one(), |bed| {
        let links = [link("lo", 1, "127.0.0.1/8"), link("enp1s0f0np0", 10, "192.168.100.1/16"), link("enP2p1s0f0np0", 12, "192.168.101.1/16")];
        bed.write("answers/ip-addr.json", &addresses(&links));
        // A shared subnet does harm only if functions answer ARP for each other.
        bed.write("proc/sys/net/ipv4/conf/all/arp_ignore", "0\n");
    }) => Fragile "shared-subnet" ["rocep1s0f0 and roceP2p1s0f0", "a subnet of its own"] "";
    "the management network in a rail's subnet": with(one(), |bed| {
        let links = [link("enP7s7", 2, "192.168.100.77/24"), link("enp1s0f0np0", 10, "192.168.100.1/24"), link("enP2p1s0f0np0", 12, "192.168.101.1/24")];
        bed.write("answers/ip-addr.json", &addresses(&links));
    }) => Fragile "subnet-clash" ["enP7s7", "rocep1s0f0", "192.168.100.0/24", "another subnet"] "";
    "twins that answer ARP for each other": with(one(), |bed| bed.write("proc/sys/net/ipv4/conf/all/arp_ignore", "0\n")) =>
        Fragile "arp" ["rocep1s0f0", "roceP2p1s0f0"] "arp_ignore=1";
    "ARP with rp_filter 1 in one subnet": with(one(), |bed| {
        for name in ["enp1s0f0np0", "enP2p1s0f0np0", "all"] {
            bed.write(&format!("proc/sys/net/ipv4/conf/{name}/rp_filter"), "1\n");
        }
        let links = [link("enp1s0f0np0", 10, "192.168.100.1/16"), link("enP2p1s0f0np0", 12, "192.168.101.1/16")];
        bed.write("answers/ip-addr.json", &addresses(&links));
    }) => Fragile "arp" ["rp_filter"] "rp_filter=2";
    "a twin with a link-local address alone": with(one(), |bed| {
        for at in [2, 3] {
            bed.port("roceP2p1s0f0", &format!("gids/{at}"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        }
        let local = serde_json::json!({"family": "inet6", "local": "fe80::fe4c:eaff:fef9:4234", "prefixlen": 64});
        let mut twin = link("enP2p1s0f0np0", 12, "");
        twin["addr_info"] = serde_json::json!([local]);
        bed.write("answers/ip-addr.json", &addresses(&[link("enp1s0f0np0", 10, "192.168.100.1/24"), twin]));
    }) => Note "link-local-only" ["roceP2p1s0f0", "rocep1s0f0", "a subnet of its own"] "";
    "a port that reports no speed": with(one(), |bed| bed.port("rocep1s0f0", "rate", "unknown\n")) => Note "unknown-speed" ["rocep1s0f0"] "ethtool enp1s0f0np0";
    "an automatic profile on a twin without an address": with(one(), |bed| {
        let links = [link("lo", 1, "127.0.0.1/8"), link("enp1s0f0np0", 10, "192.168.100.1/24"), link("enP2p1s0f0np0", 12, "")];
        bed.write("answers/ip-addr.json", &addresses(&links));
        bed.profile("enP2p1s0f0np0", "-999", "Wired connection 1", "auto");
    }) => Fragile "automatic-profile" ["enP2p1s0f0np0 (\"Wired connection 1\")", "DHCP"] "sudo nmcli con delete \"Wired connection 1\" && sudo netplan apply";
    "an automatic profile on a rail with an address": with(one(), |bed| bed.profile("enp1s0f0np0", "-999", "Kabelgebunden 1", "auto")) =>
        Note "automatic-profile" ["enp1s0f0np0 (\"Kabelgebunden 1\")", "can change"] "nmcli con delete \"Kabelgebunden 1\"";
    "NCCL_SOCKET_IFNAME that no interface has": with(one(), |bed| bed.set("NCCL_SOCKET_IFNAME", "eth0")) =>
        Broken "socket-ifname" ["NCCL_SOCKET_IFNAME=eth0", "enP7s7"] "unset NCCL_SOCKET_IFNAME";
    "functions that are absent": with(one(), |bed| {
        for path in ["sys/class/infiniband/rocep1s0f1", "sys/class/infiniband/roceP2p1s0f1"] {
            bed.remove(path);
        }
    }) => Note "functions-absent" ["2 of the 4"] "lspci";
    "retransmissions, one in 1,000": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/local_ack_timeout_err", "100000\n")) =>
        Fragile "retransmissions" ["rocep1s0f0", "local_ack_timeout_err 100000"] "ethtool -S enp1s0f0np0";
    "a few retransmissions": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/packet_seq_err", "3\n")) =>
        Note "retransmissions" ["packet_seq_err 3"] "ethtool";
    "packets out of sequence": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/out_of_sequence", "50000\n")) =>
        Fragile "out-of-sequence" ["out_of_sequence 50000"] "pause";
    "congestion notifications": with(one(), |bed| bed.port("roceP2p1s0f0", "hw_counters/np_cnp_sent", "50000\n")) =>
        Fragile "congestion" ["roceP2p1s0f0", "np_cnp_sent"] "enP2p1s0f0np0";
    "errors on the wire": with(one(), |bed| bed.port("rocep1s0f0", "counters/symbol_error", "9000\n")) =>
        Fragile "link-errors" ["symbol_error 9000"] "ethtool -m enp1s0f0np0";
    "discards": with(one(), |bed| bed.port("rocep1s0f0", "counters/port_xmit_discards", "9000\n")) => Fragile "discards" ["9000"] "ethtool";
    "receiver not ready": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/out_of_buffer", "9000\n")) =>
        Fragile "receiver-not-ready" ["out_of_buffer"] "NCCL_DEBUG";
    "a link that flaps": with(one(), |bed| bed.port("rocep1s0f0", "counters/link_downed", "40\n")) => Fragile "flapping-link" ["40 times"] "ethtool -m";
    "libibverbs missing": with(one(), |bed| bed.remove(&format!("{LIB}/libibverbs.so.1"))) => Broken "libibverbs" ["libibverbs.so.1"] "libibverbs1";
    "mlx5's provider missing": with(one(), |bed| bed.remove(&format!("{LIB}/libibverbs/libmlx5-rdmav34.so"))) =>
        Broken "mlx5-provider" ["mlx5"] "ibverbs-providers";
    "NCCL 2.28.9 of NVIDIA's wheel, by its build id": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "NCCL version 2.28.9+cuda13.0", build_id: "a7f420a15e47d481db802629159ebc51c94d89c9", ..Object::new()
    })) => Fragile "nccl-bad-build" ["2.28.9+cuda13.0", "a7f420a15e47d481", "2353"] "2.29.3";
    "NCCL 2.29.2 by GCC 8": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "NCCL version 2.29.2+cuda13.0", compiler: "GCC: (GNU) 8.5.0 20210514 (Red Hat 8.5.0-21)", ..Object::new()
    })) => Fragile "nccl-bad-build" ["2.29.2", "GCC 8"] "2.29.3";
    "an NCCL with few reports from Sparks": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "NCCL version 2.29.3+cuda13.1", compiler: "GCC: (GNU) 8.5.0 20210514 (Red Hat 8.5.0-21)", ..Object::new()
    })) => Note "nccl-unknown-build" ["2.29.3", "few reports of this build"] "";
    "NCCL 2.31.2": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "NCCL version 2.31.2+cuda13.1", ..Object::new()
    })) => Note "nccl-unknown-build" ["2.31.2", "uninitialised constants"] "";
    "NCCL 2.32.3": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "NCCL version 2.32.3+cuda13.2", ..Object::new()
    })) => Note "nccl-unknown-build" ["2.32.3", "two Sparks"] "";
    "NCCL 2.30.4 with NVLS": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "NCCL version 2.30.4+cuda13.1", ..Object::new()
    })) => Fragile "nccl-nvls" ["2.30.4", "2167"] "NCCL_NVLS_ENABLE=0";
    "a libnccl without a version": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "nothing", build_id: "c0db9360000000000000000000000000000000dd", ..Object::new()
    })) => Note "nccl-unknown" ["libnccl.so.2"] "";
    "a libnccl that is no library": with(one(), |bed| bed.write(&format!("{LIB}/libnccl.so.2"), "\u{7f}ELF")) =>
        Note "nccl-unreadable" ["libnccl.so.2"] "";
    "an NCCL that is too old": with(one(), |bed| bed.object(&format!("{LIB}/libnccl.so.2"), &Object {
        text: "NCCL version 2.18.5+cuda12.2", ..Object::new()
    })) => Broken "nccl-too-old" ["2.18.5"] "nvidia-nccl-cu13>=2.29.3";
    "a bad NCCL in PyTorch's own folder": with(one(), |bed| {
        bed.write("venv/bin/python3", "\u{7f}ELF");
        bed.write("venv/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n");
        let site = "venv/lib/python3.12/site-packages";
        bed.object(&format!("{site}/torch/lib/libtorch_cuda.so"), &Object { rpath: Some("$ORIGIN/../../nvidia/nccl/lib"), ..Object::new() });
        bed.object(&format!("{site}/nvidia/nccl/lib/libnccl.so.2"), &Object {
            text: "NCCL version 2.28.9+cuda13.0", build_id: "a7f420a15e47d481db802629159ebc51c94d89c9", ..Object::new()
        });
        bed.request.python = Some("/venv/bin/python3".into());
    }) => Fragile "nccl-bad-build" ["PyTorch of /venv/bin/python3"] "pip install";
    "VLLM_NCCL_SO_PATH beside the system's NCCL": with(one(), |bed| {
        bed.object("opt/nccl/libnccl.so.2", &Object { text: "NCCL version 2.28.9+cuda13.0", build_id: "c0db9360000000000000000000000000000000ee", ..Object::new() });
        bed.set("VLLM_NCCL_SO_PATH", "/opt/nccl/libnccl.so.2");
    }) => Note "nccl-several" ["/opt/nccl/libnccl.so.2 (VLLM_NCCL_SO_PATH)"] "unset LD_PRELOAD VLLM_NCCL_SO_PATH";
    "HPC-X's plugin comes first": with(one(), |bed| {
        bed.object("opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so", &Object { text: "IBext_v10", ..Object::new() });
        bed.set("LD_LIBRARY_PATH", "/opt/hpcx/nccl_rdma_sharp_plugin/lib");
        bed.request.variables.retain(|(name, _)| !name.starts_with("NCCL_NET"));
    }) => Broken "other-plugin" ["HPC-X's", "/opt/hpcx/"] "NCCL_NET_PLUGIN=";
    "NCCL_NET_PLUGIN names a file that is not there": with(one(), |bed| bed.remove("usr/local/lib/libnccl-net-spark.so")) =>
        Broken "plugin-kept-out" ["file not found: /usr/local/lib/libnccl-net-spark.so"] "apt install";
    "two builds of this plugin": with(one(), |bed| bed.object(&format!("{LIB}/libnccl-net-spark.so"), &Object {
        text: "spark-rails", build_id: "0000000000000000000000000000000000000002", ..Object::new()
    })) => Fragile "plugin-copies" ["/usr/local/lib/libnccl-net-spark.so", "aarch64-linux-gnu"] "uninstall";
    "a plugin that needs a newer glibc": with(one(), |bed| bed.object("usr/local/lib/libnccl-net-spark.so", &Object {
        text: "spark-rails", glibc: Some("2.41"), ..Object::new()
    })) => Broken "glibc" ["2.41", "2.39"] "deb";
    "a variable of /etc/nccl.conf": with(one(), |bed| {
        bed.write("etc/nccl.conf", "NCCL_IB_TIMEOUT=22\n");
    }) => Fragile "slow-failover" ["NCCL_IB_TIMEOUT=22"] "unset";
    "a process that has HPC-X's plugin": with(process("/opt/hpcx/lib/libnccl-net.so"), |bed| {
        bed.object("opt/hpcx/lib/libnccl-net.so", &Object { text: "IBext_v10", ..Object::new() });
    }) => Broken "other-plugin" ["has loaded HPC-X's"] "NCCL_NET_PLUGIN=";
    "a process with NCCL and no plugin": process("/usr/bin/python3") => Broken "plugin-not-loaded" ["process 42"] "NCCL_NET_PLUGIN=";
    "a process that has not loaded NCCL": with(process("/usr/bin/python3"), |bed| {
        bed.write("proc/42/maps", "ffff80000000-ffff80001000 r-xp 00000000 08:01 77 /usr/bin/python3\n");
    }) => Note "nccl-not-loaded" ["process 42"] "pgrep -P 42";
    "a process bound to one processor": with(process("/usr/local/lib/libnccl-net-spark.so"), |bed| {
        bed.replace("proc/42/status", "0-19", "3");
    }) => Slow "one-processor" ["processor 3"] "--bind-to none";
}

fn process(loaded: &str) -> Bed {
    let mut bed = one();
    bed.process("42");
    bed.write(
        "proc/42/environ",
        "NCCL_NET=Spark\0NCCL_NET_PLUGIN=/usr/local/lib/libnccl-net-spark.so\0HF_TOKEN=secret\0",
    );
    let map = |path: &str| format!("ffff80000000-ffff80001000 r-xp 00000000 08:01 77 {path}\n");
    bed.write(
        "proc/42/maps",
        &[
            map(&format!("/{LIB}/libnccl.so.2")),
            map(loaded),
            map(&format!("/{LIB}/libibverbs.so.1")),
        ]
        .concat(),
    );
    bed.request.pid = Some(42);
    bed
}

/// A machine with the Debian package. `/lib` is a link to `/usr/lib`, so each library has a path
/// below each of the two.
fn deb() -> Bed {
    with(one(), |bed| {
        std::os::unix::fs::symlink("usr/lib", bed.path("lib")).unwrap();
        bed.remove("usr/local/lib/libnccl-net-spark.so");
        bed.plugin(&format!("{LIB}/libnccl-net-spark.so"));
        bed.set("NCCL_NET_PLUGIN", &format!("/{LIB}/libnccl-net-spark.so"));
        bed.set("VLLM_NCCL_SO_PATH", &format!("/{LIB}/libnccl.so.2"));
    })
}

/// A machine with NetworkManager profiles that are no fault: static addresses, DHCP that the owner
/// chose, and the management network.
fn profiles() -> Bed {
    with(two(), |bed| {
        bed.profile("enP7s7", "-999", "Wired connection 1", "auto");
        bed.profile("enp1s0f0np0", "0", "netplan-enp1s0f0np0", "manual");
        bed.profile("enP2p1s0f0np0", "-999", "Wired connection 2", "manual");
        bed.profile("enp1s0f1np1", "0", "rail: by DHCP", "auto");
    })
}

#[test]
fn nothing_is_found_on_healthy_machines() {
    for (name, bed) in [
        ("a Spark with one cable", one()),
        ("a Spark with two cables", two()),
        (
            "a process on it",
            process("/usr/local/lib/libnccl-net-spark.so"),
        ),
        ("a deb where /lib is a link to /usr/lib", deb()),
        (
            "NetworkManager's profiles that somebody chose, or of other interfaces",
            profiles(),
        ),
    ] {
        let answer = bed.answer();
        assert_eq!(answer.findings, [], "{name}");
        assert_eq!(answer.verdict, Verdict::Good, "{name}");
        let text = serde_json::to_string(&answer).unwrap();
        assert!(
            !text.contains("secret") && !text.contains("HF_TOKEN"),
            "{name}: {text}"
        );
    }
}

/// For the ids of some faults: other ids that may be found together with the fault.
const TOGETHER: &[(&str, &[&str])] = &[
    ("hca-filter-empty", &["no-rail"]),
    ("unequal-mtus", &["small-mtu"]),
    ("shared-subnet", &["subnet-clash", "arp"]),
    ("arp", &["shared-subnet", "subnet-clash"]),
    ("nccl-nvls", &["nccl-unknown-build"]),
    ("nccl-too-old", &["nccl-unknown-build"]),
    ("other-plugin", &["plugin-not-named"]),
];

#[test]
fn each_fault_is_found_and_named_with_its_cure() {
    let mut strange = Vec::new();
    for fault in FAULTS {
        let answer = (fault.plant)().answer();
        let matches = |finding: &&Finding| {
            let named = fault.words.iter().all(|word| finding.text.contains(word));
            finding.id == fault.id && finding.severity == fault.severity && named
        };
        let found = answer.findings.iter().find(matches);
        let found =
            found.unwrap_or_else(|| panic!("{}: not found in {:#?}", fault.name, answer.findings));
        let cure = found.cure.as_deref().unwrap_or("");
        assert!(
            cure.contains(fault.cure) && cure.is_empty() == fault.cure.is_empty(),
            "{}: {cure}",
            fault.name
        );
        let wanted = match fault.severity {
            Broken => Verdict::Broken,
            Slow | Fragile => Verdict::Impaired,
            Note => Verdict::Good,
        };
        assert_eq!(
            answer.verdict, wanted,
            "{}: {:#?}",
            fault.name, answer.findings
        );
        let with = TOGETHER
            .iter()
            .find(|(id, _)| *id == fault.id)
            .map_or(&[][..], |(_, with)| with);
        let others = answer
            .findings
            .iter()
            .filter(|finding| finding.id != fault.id && !with.contains(&&*finding.id));
        strange.extend(others.map(|finding| (fault.name, finding.clone())));
    }
    assert!(strange.is_empty(), "{strange:#?}");
}

/// If an error removes a NIC's functions, their counters disappear too. Only the root port still
/// shows the error.
#[test]
fn a_root_port_without_its_nic_still_reports_fatal_errors() {
    let bed = with(Bed::plain(), |bed| {
        let kinds = [("cor", "7\n"), ("nonfatal", "0\n"), ("fatal", "2\n")];
        for address in ["0000:00:00.0", "0002:00:00.0"] {
            let port = format!("sys/bus/pci/devices/{address}");
            bed.write(&format!("{port}/class"), "0x060400\n");
            kinds.iter().for_each(|(kind, text)| {
                bed.write(&format!("{port}/aer_rootport_total_err_{kind}"), text)
            });
        }
        // On other machines this is the address of the host bridge, which is no PCIe port.
        bed.write("sys/bus/pci/devices/0000:00:00.0/class", "0x060000\n");
    });
    let answer = bed.answer();
    let found: Vec<_> = answer
        .findings
        .iter()
        .filter(|finding| finding.id == "pcie-uncorrected")
        .collect();
    let [finding] = found[..] else {
        panic!("{:#?}", answer.findings)
    };
    let text = "the PCIe port 0002:00:00.0 (without an RDMA device below it) has had 2 fatal and 0 other uncorrected";
    assert!(finding.text.starts_with(text), "{finding:?}");
}

/// Two faults that files cannot describe, so the test plants them in the facts: libibverbs fails,
/// and libibverbs lists a port that sysfs lacks.
#[test]
fn a_copy_of_a_machine_is_judged_despite_missing_parts() {
    let job_facts = JobFacts {
        plugin: String::new(),
        nvls_is_off: false,
        proxy_cpus: None,
        socket_interfaces: None,
    };
    let mut facts = look::facts(&Place::new(one().path("")), None, &[], &mut Vec::new());
    let judged = |facts: &Facts| {
        let found = judge::machine(facts, &job_facts);
        found
            .into_iter()
            .map(|finding| (finding.severity, finding.id))
            .collect::<Vec<_>>()
    };
    let warning = Warning {
        kind: WarningKind::UnknownWiring,
        devices: vec!["mlx5_0".into()],
        text: "mlx5_0".into(),
    };
    facts.survey.warnings = vec![warning];
    facts.verbs = Err("the RDMA library libibverbs.so.1 has no function ibv_reg_mr".to_owned());
    assert_eq!(
        judged(&facts),
        [(Broken, "verbs".into()), (Fragile, "unknown-wiring".into())]
    );
}

#[test]
fn a_fault_of_several_rails_is_one_finding() {
    let both = |plant: fn(&mut Bed, &str, &str)| {
        with(one(), |bed| {
            plant(bed, "rocep1s0f0", "enp1s0f0np0");
            plant(bed, "roceP2p1s0f0", "enP2p1s0f0np0");
        })
    };
    let no_pause = |bed: &mut Bed, _: &str, netdev: &str| {
        bed.replace(
            &format!("answers/ethtool-a/{netdev}"),
            "RX:\t\ton\nTX:\t\ton",
            "RX:\t\toff\nTX:\t\toff",
        );
    };
    let payload = |bed: &mut Bed, device: &str, _: &str| bed.transactions(device, 0, 2);
    let mtu = |bed: &mut Bed, _: &str, netdev: &str| {
        bed.write(&format!("sys/class/net/{netdev}/mtu"), "1500\n")
    };
    let profile = |bed: &mut Bed, _: &str, netdev: &str| {
        bed.profile(netdev, "-999", &format!("Wired {netdev}"), "auto")
    };
    let down = with(one(), |bed| {
        ["rocep1s0f0", "roceP2p1s0f0"]
            .iter()
            .for_each(|device| bed.port(device, "state", "1: DOWN\n"));
    });
    let closed = with(one(), |bed| {
        [0, 2]
            .iter()
            .for_each(|at| bed.write(&format!("answers/open/uverbs{at}"), "EPERM"));
    });
    for (bed, id, words, cure) in [
        (
            both(no_pause),
            "no-pause",
            "enp1s0f0np0 (rocep1s0f0) and enP2p1s0f0np0 (roceP2p1s0f0) neither take nor send pause",
            " && ",
        ),
        (
            both(payload),
            "pcie-payload",
            "the largest PCIe payload of rocep1s0f0 and roceP2p1s0f0 is 128 bytes",
            "fwupdmgr",
        ),
        (
            both(profile),
            "automatic-profile",
            "(\"Wired enP2p1s0f0np0\"): NetworkManager's automatic profiles keep them",
            "sudo nmcli con delete \"Wired enp1s0f0np0\" && sudo nmcli con delete \"Wired enP2p1s0f0np0\" && sudo netplan apply",
        ),
        (
            both(mtu),
            "small-mtu",
            "rocep1s0f0 and roceP2p1s0f0 have a path MTU of 1024",
            " && ",
        ),
        (
            down,
            "no-rail",
            "roceP2p1s0f1 cannot be used: the ports are down: no cable, or their interfaces are not up",
            "with a cable in p0 or p1",
        ),
        (
            closed,
            "device-forbidden",
            "uverbs0 (rocep1s0f0) and /dev/infiniband/uverbs2 (roceP2p1s0f0) may not be opened here: the container was not given them",
            "docker",
        ),
    ] {
        let answer = bed.answer();
        let found: Vec<_> = answer
            .findings
            .iter()
            .filter(|finding| finding.id == id)
            .collect();
        let [finding] = found[..] else {
            panic!("{id}: {:#?}", answer.findings)
        };
        assert!(finding.text.contains(words), "{finding:?}");
        assert!(
            finding.cure.as_deref().unwrap().contains(cure),
            "{finding:?}"
        );
    }
    let odd = with(one(), |bed| {
        bed.profile("enp1s0f0np0", "-999", "x$(reboot): \"", "auto")
    })
    .answer();
    let found = odd
        .findings
        .iter()
        .find(|finding| finding.id == "automatic-profile")
        .unwrap();
    assert!(
        found
            .cure
            .as_deref()
            .unwrap()
            .starts_with("sudo nmcli con delete 3c1f9d0e-"),
        "{found:?}"
    );
    let excluded = with(two(), |bed| bed.set("NCCL_IB_HCA", "mlx5_7")).answer();
    let found = excluded
        .findings
        .iter()
        .find(|finding| finding.id == "no-rail")
        .unwrap();
    assert!(
        found
            .text
            .ends_with(" cannot be used: NCCL_IB_HCA excludes them"),
        "{found:?}"
    );
    assert_eq!(found.cure.as_deref(), Some("unset NCCL_IB_HCA"));
}

#[test]
fn the_table_in_faults_md_matches() {
    let document = include_str!("../faults.md");
    let word = |severity: Severity| severity.word().to_lowercase();
    let rows: Vec<String> = FAULTS
        .iter()
        .map(|fault| {
            format!(
                "| {} | {} | `{}` |",
                fault.name,
                word(fault.severity),
                fault.id
            )
        })
        .collect();
    let section = document.split("\n## ").nth(1).unwrap();
    let found: Vec<&str> = section
        .lines()
        .filter(|line| line.starts_with("| ") && line.ends_with("` |"))
        .collect();
    assert_eq!(
        found,
        rows,
        "commands/doctor/faults.md should have:\n{}",
        rows.join("\n")
    );
}
