//! Test machines. Each is a folder that has the files of a DGX Spark, as owners posted them, or of
//! a machine without RDMA devices. Files below `answers` have the facts for which a live machine
//! has no file.

use crate::commands::doctor::answer::{self, Answer, Request};
use crate::commands::doctor::place::Place;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

pub struct Bed {
    root: tempfile::TempDir,
    pub request: Request,
}

type Function = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    u8,
    &'static str,
);

/// The four functions: device, interface, PCI address, physical port, last digit of the GUID, and
/// the IP address that the interface has if the port has a cable.
pub const FUNCTIONS: [Function; 4] = [
    (
        "rocep1s0f0",
        "enp1s0f0np0",
        "0000:01:00.0",
        "p0",
        0,
        "192.168.100.1",
    ),
    (
        "rocep1s0f1",
        "enp1s0f1np1",
        "0000:01:00.1",
        "p1",
        1,
        "192.168.102.1",
    ),
    (
        "roceP2p1s0f0",
        "enP2p1s0f0np0",
        "0002:01:00.0",
        "p0",
        4,
        "192.168.101.1",
    ),
    (
        "roceP2p1s0f1",
        "enP2p1s0f1np1",
        "0002:01:00.1",
        "p1",
        5,
        "192.168.103.1",
    ),
];

pub const LIB: &str = "usr/lib/aarch64-linux-gnu";
const COUNTERS: [&str; 11] = [
    "symbol_error",
    "port_rcv_errors",
    "link_downed",
    "link_error_recovery",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_data",
    "port_rcv_data",
    "port_xmit_packets",
    "port_rcv_packets",
];
const HW_COUNTERS: [&str; 9] = [
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
    "np_cnp_sent",
    "rp_cnp_handled",
    "out_of_buffer",
    "rnr_nak_retry_err",
    "rx_icrc_encapsulated",
    "req_transport_retries_exceeded",
];

impl Bed {
    pub fn plain() -> Self {
        // Each machine has hundreds of small files, so they are in memory if possible.
        let memory = Path::new("/dev/shm");
        let root = tempfile::tempdir_in(memory)
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        let bed = Self {
            root,
            request: Request::default(),
        };
        bed.write("proc/sys/kernel/osrelease", "6.17.0-1014-nvidia\n");
        bed.write(
            "proc/meminfo",
            "MemTotal: 125510000 kB\nCmaTotal:       32768 kB\nCmaFree:        30000 kB\n",
        );
        bed.process("self");
        bed.write(
            "proc/modules",
            "mlx5_ib 500000 0 - Live 0x0\nib_uverbs 200000 2 mlx5_ib, Live 0x0\n",
        );
        bed.write("dev/kmsg", KERNEL_LOG);
        bed.write("sys/class/dmi/id/sys_vendor", "NVIDIA\n");
        bed.write("sys/class/dmi/id/product_name", "NVIDIA_DGX_Spark\n");
        bed.write("sys/class/dmi/id/bios_version", "5.36_0ACUM018\n");
        bed.write("sys/class/dmi/id/bios_date", "07/29/2025\n");
        for cpu in 0..20 {
            let folder = format!("sys/devices/system/cpu/cpu{cpu}");
            let is_fast = matches!(cpu, 5..=9 | 15..=19);
            bed.write(
                &format!("{folder}/cpu_capacity"),
                if is_fast { "1024\n" } else { "718\n" },
            );
            bed.write(&format!("{folder}/cpuidle/state0/name"), "WFI\n");
            bed.write(&format!("{folder}/cpuidle/state0/latency"), "1\n");
            bed.write(&format!("{folder}/cpuidle/state0/disable"), "0\n");
        }
        bed.write(
            "answers/ip-addr.json",
            &addresses(&[
                link("lo", 1, "127.0.0.1/8"),
                link("enP7s7", 2, "10.0.0.7/24"),
            ]),
        );
        bed.write("answers/cuda", "1 0 0\n");
        bed.write("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
        bed.write("etc/ld.so.conf.d/cuda.conf", "/usr/local/cuda/lib64\n");
        bed.object(
            &format!("{LIB}/libc.so.6"),
            &Object {
                text: "GNU C Library (Ubuntu GLIBC 2.39-0ubuntu8.3) stable release version 2.39.",
                ..Object::new()
            },
        );
        bed.object(&format!("{LIB}/libibverbs.so.1"), &Object::new());
        bed.object(
            &format!("{LIB}/libibverbs/libmlx5-rdmav34.so"),
            &Object::new(),
        );
        let good = Object {
            text: "NCCL version 2.28.9+cuda13.0",
            build_id: "c0db9360000000000000000000000000000000ff",
            ..Object::new()
        };
        bed.object(&format!("{LIB}/libnccl.so.2"), &good);
        bed.plugin("usr/local/lib/libnccl-net-spark.so");
        bed.with_variables(&[
            ("PATH", "/usr/bin"),
            ("HOME", "/home/me"),
            ("NCCL_NET", "Spark"),
            ("NCCL_NET_PLUGIN", "/usr/local/lib/libnccl-net-spark.so"),
        ])
    }

    /// Makes a Spark with cables in the ports that `cables` names ("p0", "p1"). Each rail has its
    /// own subnet.
    /// Lets the doctor measure the rails of a cable, with these results.
    pub fn measure_silence(&mut self, [first_s, second_s]: [&str; 2]) {
        self.request.silence_limit = Some(Duration::from_secs(1));
        let text = format!("rocep1s0f0:1 {first_s}\nroceP2p1s0f0:1 {second_s}\n");
        self.write("answers/silence", &text);
    }

    pub fn spark(cables: &[&str]) -> Self {
        let bed = Self::plain();
        for (at, function) in FUNCTIONS.iter().enumerate() {
            bed.function(at, function, cables.contains(&function.3));
        }
        bed.interfaces(&bed.links(cables));
        bed.write("proc/sys/net/ipv4/conf/all/arp_ignore", "1\n");
        bed.write("proc/sys/net/ipv4/conf/all/rp_filter", "2\n");
        bed
    }

    /// The interfaces of a Spark with these cables.
    pub fn links(&self, cables: &[&str]) -> Vec<serde_json::Value> {
        let mut links = vec![
            link("lo", 1, "127.0.0.1/8"),
            link("enP7s7", 2, "10.0.0.7/24"),
        ];
        for (at, (_, netdev, _, port, _, address)) in FUNCTIONS.iter().enumerate() {
            let own = if cables.contains(port) {
                format!("{address}/24")
            } else {
                String::new()
            };
            links.push(link(netdev, 10 + at as u32, &own));
        }
        links
    }

    pub fn interfaces(&self, links: &[serde_json::Value]) {
        self.write("answers/ip-addr.json", &addresses(links));
    }

    /// The interfaces that the machine has now.
    pub fn links_written(&self) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(self.path("answers/ip-addr.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// Empties the GID table of a device's port.
    pub fn no_gids(&self, device: &str) {
        for at in 0..4 {
            self.port(
                device,
                &format!("gids/{at}"),
                "0000:0000:0000:0000:0000:0000:0000:0000\n",
            );
        }
    }

    /// Makes the machine another one than a Spark, with cards from a shop.
    pub fn other_machine(&self) {
        self.write("sys/class/dmi/id/sys_vendor", "Supermicro\n");
        self.write("sys/class/dmi/id/product_name", "SYS-821GE-TNHR\n");
        for (device, ..) in FUNCTIONS {
            self.write(
                &format!("sys/class/infiniband/{device}/board_id"),
                "MT_0000000838\n",
            );
        }
    }

    /// Hides a function's interface, as a container does that has the device alone: the kernel then
    /// hides the port's GIDs too.
    pub fn hide_interface(&self, function: &Function) {
        let (device, netdev, address, ..) = *function;
        let domain = &address[..4];
        self.no_gids(device);
        (0..4).for_each(|at| self.port(device, &format!("gid_attrs/ndevs/{at}"), ""));
        self.remove(&format!("sys/class/net/{netdev}"));
        let pci = format!("sys/devices/pci{domain}:00/{domain}:00:00.0/{address}");
        fs::remove_dir_all(self.path(&format!("{pci}/net"))).unwrap();
        let mut links = self.links_written();
        links.retain(|link| link["ifname"] != netdev);
        self.interfaces(&links);
    }

    /// Moves a function's address to a VLAN with this MTU.
    pub fn vlan(&self, function: &Function, mtu: &str) {
        let (device, netdev, .., address) = *function;
        let vlan = format!("{netdev}.100");
        let mut links = self.links_written();
        links.retain(|link| link["ifname"] != netdev);
        links.push(link(netdev, 10, ""));
        links.push(link(&vlan, 30, &format!("{address}/24")));
        self.interfaces(&links);
        for at in [2, 3] {
            self.port(
                device,
                &format!("gid_attrs/ndevs/{at}"),
                &format!("{vlan}\n"),
            );
        }
        for name in [netdev, &vlan] {
            self.write(&format!("sys/class/net/{name}/mtu"), mtu);
        }
        self.write(&format!("sys/class/net/{vlan}/ifindex"), "30\n");
        self.link(
            &format!("sys/class/net/{netdev}"),
            &format!("sys/class/net/{vlan}/lower_{netdev}"),
        );
    }

    /// Makes a bond of the two functions of the first PCIe link, as mlx5 shows RoCE LAG: the first
    /// function has the RDMA device `mlx5_bond_0`, the second has none.
    pub fn bond(&mut self) {
        let folder = "sys/devices/pci0000:00/0000:00:00.0";
        let [first, second] = [&FUNCTIONS[0], &FUNCTIONS[1]];
        for (device, netdev, address, ..) in [first, second] {
            self.remove(&format!("sys/class/infiniband/{device}"));
            let net = format!("{folder}/{address}/net/{netdev}");
            self.link("sys/class/net/bond0", &format!("{net}/master"));
        }
        let rdma = format!("{folder}/{}/infiniband", first.2);
        fs::rename(
            self.path(&format!("{rdma}/{}", first.0)),
            self.path(&format!("{rdma}/mlx5_bond_0")),
        )
        .unwrap();
        fs::remove_dir_all(self.path(&format!("{folder}/{}/infiniband", second.2))).unwrap();
        self.link(
            &format!("{rdma}/mlx5_bond_0"),
            "sys/class/infiniband/mlx5_bond_0",
        );
        self.write("sys/class/net/bond0/bonding/mode", "802.3ad 4\n");
        self.write("sys/class/net/bond0/mtu", "9000\n");
        self.write("sys/class/net/bond0/ifindex", "20\n");
        for at in 0..4 {
            self.port("mlx5_bond_0", &format!("gid_attrs/ndevs/{at}"), "bond0\n");
        }
        self.port("mlx5_bond_0", "rate", "400 Gb/sec (4X NDR)\n");
        self.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_bond_0\n");
        self.remove("sys/class/infiniband_verbs/uverbs1/ibdev");
        self.remove("dev/infiniband/uverbs1");
        let mut links = self.links(&["p0", "p1"]);
        links.retain(|link| link["ifname"] != first.1 && link["ifname"] != second.1);
        links.push(link("bond0", 20, &format!("{}/24", first.5)));
        links.push(link(first.1, 10, ""));
        links.push(link(second.1, 11, ""));
        self.interfaces(&links);
        self.write(
            "answers/ethtool-a/bond0",
            "Pause parameters for bond0:\nAutonegotiate:\toff\nRX:\t\ton\nTX:\t\ton\n",
        );
    }

    pub fn container() -> Self {
        let bed = Self::spark(&["p0"]);
        bed.write(".dockerenv", "");
        fs::remove_dir_all(bed.path("dev/infiniband")).unwrap();
        bed
    }

    pub fn with_variables(mut self, variables: &[(&str, &str)]) -> Self {
        self.request.variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        self
    }

    pub fn set(&mut self, name: &str, value: &str) {
        self.request.variables.retain(|(known, _)| known != name);
        self.request
            .variables
            .push((name.to_owned(), value.to_owned()));
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    pub fn write(&self, below: &str, text: &str) {
        let path = self.path(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn remove(&self, below: &str) {
        fs::remove_file(self.path(below)).unwrap();
    }

    pub fn profile(&self, netdev: &str, priority: &str, name: &str, method: &str) {
        let uuid = format!("3c1f9d0e-0000-3bb8-8369-{:012}", netdev.len());
        let active = fs::read_to_string(self.path("answers/nmcli/active")).unwrap_or_default();
        self.write(
            "answers/nmcli/active",
            &format!("{active}{netdev}:{priority}:{uuid}:{name}\n"),
        );
        self.write(&format!("answers/nmcli/{uuid}"), &format!("{method}\n"));
    }

    /// Writes the output of `mlnx_qos` for both functions of `p0`. `enabled` has a 1 for each
    /// priority with PFC. If `trust` is "dscp", the output maps eight DSCPs to each priority, which
    /// is the tool's default.
    pub fn mlnx_qos(&self, trust: &str, enabled: &str) {
        let mut text = format!("DCBX mode: OS controlled\nPriority trust state: {trust}\n");
        if trust == "dscp" {
            text += "dscp2prio mapping:\n";
            for priority in 0..8 {
                let dscps: Vec<String> = (8 * priority..8 * priority + 8)
                    .rev()
                    .map(|dscp| format!("{dscp:02}"))
                    .collect();
                text += &format!("\tprio:{priority} dscp:{},\n", dscps.join(","));
            }
        }
        let head = "PFC configuration:\n\tpriority    0   1   2   3   4   5   6   7";
        text += &format!(
            "Cable len: 7\n{head}\n\tenabled     {enabled}\ntc: 0 ratelimit: unlimited, tsa: vendor\n"
        );
        for netdev in ["enp1s0f0np0", "enP2p1s0f0np0"] {
            self.write(&format!("answers/mlnx_qos/{netdev}"), &text);
        }
    }

    /// Adds an enabled systemd unit that runs a script. The script sets priorities, as owners'
    /// scripts do.
    pub fn qos_unit(&self) {
        let unit = "[Service]\nType=oneshot\nExecStart=/bin/bash /usr/local/sbin/roce.sh\n";
        self.write("etc/systemd/system/roce.service", unit);
        self.write(
            "etc/systemd/system/multi-user.target.wants/roce.service",
            unit,
        );
        self.write(
            "usr/local/sbin/roce.sh",
            "#!/bin/sh\nmlnx_qos -i enp1s0f0np0 --trust dscp\n",
        );
    }

    pub fn replace(&self, below: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(below)).unwrap();
        assert!(text.contains(from), "{below} has no {from}: {text}");
        fs::write(self.path(below), text.replace(from, to)).unwrap();
    }

    pub fn port(&self, device: &str, file: &str, text: &str) {
        self.write(
            &format!("sys/class/infiniband/{device}/ports/1/{file}"),
            text,
        );
    }

    pub fn pci(&self, device: &str, file: &str, text: &str) {
        self.write(
            &format!("sys/class/infiniband/{device}/device/{file}"),
            text,
        );
    }

    /// Writes the sizes of PCIe payloads and read requests into a function's configuration space. A
    /// value n of `payload` or `read_request` means 128 << n bytes.
    pub fn transactions(&self, device: &str, payload: u8, read_request: u8) {
        fs::write(
            self.path(&format!("sys/class/infiniband/{device}/device/config")),
            configuration(payload, read_request),
        )
        .unwrap();
    }

    pub fn object(&self, below: &str, object: &Object) {
        let path = self.path(below);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, object.bytes()).unwrap();
    }

    pub fn plugin(&self, below: &str) {
        self.object(
            below,
            &Object {
                text: "spark-rails",
                build_id: "0000000000000000000000000000000000000001",
                ..Object::new()
            },
        );
    }

    /// Adds a program that a shell in this folder finds first.
    pub fn program(&self, name: &str, script: &str) {
        use std::os::unix::fs::PermissionsExt;
        self.write(&format!("stubs/{name}"), script);
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(self.path(&format!("stubs/{name}")), executable).unwrap();
    }

    /// Does what loading this module does: `mlx5_ib` gives each NIC an RDMA device, and `ib_uverbs`
    /// gives each RDMA device a file.
    pub fn driver_loaded(&self, module: &str) {
        let folder = "sys/bus/pci/devices";
        let names = |below: &str| -> Vec<String> {
            let entries = fs::read_dir(self.path(below))
                .into_iter()
                .flatten()
                .flatten();
            entries
                .map(|entry| entry.file_name().into_string().unwrap())
                .collect()
        };
        match module {
            "mlx5_ib" => names(folder).iter().for_each(|address| {
                let rdma = self.path(&format!("{folder}/{address}/infiniband/mlx5_9"));
                if self.path(&format!("{folder}/{address}/vendor")).exists() {
                    fs::create_dir_all(rdma).unwrap();
                }
            }),
            _ => names("sys/class/infiniband_verbs").iter().for_each(|file| {
                self.write(&format!("dev/infiniband/{file}"), "");
            }),
        }
    }

    pub fn process(&self, name: &str) {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max locked memory         unlimited            unlimited            bytes     \n";
        self.write(&format!("proc/{name}/limits"), limits);
        self.write(
            &format!("proc/{name}/status"),
            "Name:\tx\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-19\n",
        );
    }

    /// Puts the doctor into a job of Slurm, on a machine whose limits.d allows all logins to lock
    /// memory.
    pub fn slurm_job(&self) {
        let limits = "* soft memlock unlimited\n* hard memlock unlimited\n";
        self.write("etc/security/limits.d/90-memlock.conf", limits);
        self.write(
            "proc/self/cgroup",
            "0::/system.slice/slurmstepd.scope/job_17/step_batch/user/task_0\n",
        );
    }

    pub fn answer(&self) -> Answer {
        answer::answer(&Place::new(self.root.path()), self.request.clone())
            .unwrap()
            .0
    }

    fn function(&self, at: usize, function: &(&str, &str, &str, &str, u8, &str), has_cable: bool) {
        let (device, netdev, address, phys_port, guid, own) = *function;
        let domain = &address[..4];
        let parent = format!("sys/devices/pci{domain}:00/{domain}:00:00.0");
        let folder = format!("{parent}/{address}");
        self.pci_function(&folder, &parent, address);
        let rdma = format!("{folder}/infiniband/{device}");
        for (file, text) in [
            ("node_guid", format!("fc4c:ea03:00f9:423{guid}")),
            ("sys_image_guid", "fc4c:ea03:00f9:4230".to_owned()),
            ("fw_ver", "28.45.4028".to_owned()),
            ("board_id", "NVD0000000087".to_owned()),
        ] {
            self.write(&format!("{rdma}/{file}"), &format!("{text}\n"));
        }
        self.link(&folder, &format!("{rdma}/device"));
        self.link(&rdma, &format!("sys/class/infiniband/{device}"));
        let net = format!("{folder}/net/{netdev}");
        for (file, text) in [
            ("mtu", "9000".to_owned()),
            ("dev_port", "0".to_owned()),
            ("phys_port_name", phys_port.to_owned()),
            ("ifindex", (10 + at).to_string()),
        ] {
            self.write(&format!("{net}/{file}"), &format!("{text}\n"));
        }
        self.link(&net, &format!("sys/class/net/{netdev}"));
        self.ports(&rdma, netdev, guid, has_cable.then_some(own));
        for file in ["arp_ignore", "rp_filter"] {
            self.write(
                &format!("proc/sys/net/ipv4/conf/{netdev}/{file}"),
                if file == "arp_ignore" { "0\n" } else { "2\n" },
            );
        }
        self.write(
            &format!("sys/class/infiniband_verbs/uverbs{at}/ibdev"),
            &format!("{device}\n"),
        );
        self.write(&format!("dev/infiniband/uverbs{at}"), "");
        self.write(
            &format!("answers/ethtool-a/{netdev}"),
            &format!("Pause parameters for {netdev}:\nAutonegotiate:\toff\nRX:\t\ton\nTX:\t\ton\n"),
        );
    }

    /// Writes the files of a PCI function, and of the PCIe port above it (`parent`).
    fn pci_function(&self, folder: &str, parent: &str, address: &str) {
        let domain = &address[..4];
        for (file, text) in [
            ("vendor", "0x15b3"),
            ("device", "0x1021"),
            ("class", "0x020000"),
            ("current_link_width", "4"),
            ("max_link_width", "4"),
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("iommu_group/type", "DMA-FQ"),
        ] {
            self.write(&format!("{folder}/{file}"), &format!("{text}\n"));
        }
        fs::write(self.path(&format!("{folder}/config")), configuration(2, 2)).unwrap();
        for kind in ["correctable", "nonfatal", "fatal"] {
            let short = if kind == "correctable" {
                "COR".to_owned()
            } else {
                kind.to_uppercase()
            };
            for place in [folder, parent] {
                self.write(
                    &format!("{place}/aer_dev_{kind}"),
                    &format!("RxErr 0\nTOTAL_ERR_{short} 0\n"),
                );
            }
        }
        self.write(&format!("{parent}/class"), "0x060400\n");
        for kind in ["cor", "nonfatal", "fatal"] {
            self.write(&format!("{parent}/aer_rootport_total_err_{kind}"), "0\n");
        }
        let port = format!("sys/bus/pci/devices/{domain}:00:00.0");
        if !self.path(&port).exists() {
            self.link(parent, &port);
        }
        self.link(folder, &format!("sys/bus/pci/devices/{address}"));
    }

    /// Writes the files of a port. With an `address` the port has a cable, without one it has none.
    fn ports(&self, rdma: &str, netdev: &str, guid: u8, address: Option<&str>) {
        let port = format!("{rdma}/ports/1");
        let (state, rate) = match address {
            Some(_) => ("4: ACTIVE", "200 Gb/sec (2X NDR)"),
            None => ("1: DOWN", "40 Gb/sec (4X QDR)"),
        };
        for (file, text) in [("state", state), ("rate", rate), ("link_layer", "Ethernet")] {
            self.write(&format!("{port}/{file}"), &format!("{text}\n"));
        }
        let local = format!("fe80:0000:0000:0000:fe4c:eaff:fef9:423{guid}");
        let mapped = address.map(|address| {
            let parts: Vec<u8> = address
                .split('.')
                .map(|part| part.parse().unwrap())
                .collect();
            format!(
                "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}",
                parts[0], parts[1], parts[2], parts[3]
            )
        });
        let table = [Some(local), mapped];
        for (at, gid) in table
            .iter()
            .flatten()
            .flat_map(|gid| [(gid, "IB/RoCE v1"), (gid, "RoCE v2")])
            .enumerate()
        {
            self.write(&format!("{port}/gids/{at}"), &format!("{}\n", gid.0));
            self.write(
                &format!("{port}/gid_attrs/types/{at}"),
                &format!("{}\n", gid.1),
            );
            self.write(
                &format!("{port}/gid_attrs/ndevs/{at}"),
                &format!("{netdev}\n"),
            );
        }
        for (folder, names) in [
            ("counters", &COUNTERS[..]),
            ("hw_counters", &HW_COUNTERS[..]),
        ] {
            for name in names {
                let value = if name.ends_with("packets") {
                    "50000000\n"
                } else {
                    "0\n"
                };
                self.write(&format!("{port}/{folder}/{name}"), value);
            }
        }
    }

    fn link(&self, target: &str, at: &str) {
        let at = self.path(at);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        symlink(self.path(target), at).unwrap();
    }
}

fn configuration(payload: u8, read_request: u8) -> Vec<u8> {
    let mut space = vec![0; 256];
    (space[0x06], space[0x34], space[0x60]) = (0x10, 0x60, 0x10);
    (space[0x68], space[0x69]) = (payload << 5, read_request << 4);
    space
}

/// The kernel log of a healthy machine. It has a corrected error of a rail's link, and a fatal
/// error of a device that is no rail.
pub const KERNEL_LOG: &str = "\
6,410,1034567,-;pcieport 0000:00:00.0: AER: enabled with IRQ 54
 SUBSYSTEM=pci
 DEVICE=+pci:0000:00:00.0
4,990,9034567,-;pcieport 0000:00:00.0: AER: Correctable error message received from 0000:01:00.0
4,991,9034570,-;mlx5_core 0000:01:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)
3,992,9034590,-;pcieport 0004:00:00.0: AER: Uncorrectable (Fatal) error message received from 0004:01:00.0
";

/// Makes an interface as `ip -json address` prints it. `address` may be empty.
pub fn link(name: &str, index: u32, address: &str) -> serde_json::Value {
    let loopback = if name == "lo" {
        "LOOPBACK"
    } else {
        "BROADCAST"
    };
    let info: Vec<serde_json::Value> = address.split_once('/').into_iter().map(|(local, prefix)| {
        serde_json::json!({"family": "inet", "local": local, "prefixlen": prefix.parse::<u8>().unwrap()})
    }).collect();
    serde_json::json!({"ifindex": index, "ifname": name, "flags": [loopback, "UP", "LOWER_UP"], "addr_info": info})
}

pub fn addresses(links: &[serde_json::Value]) -> String {
    serde_json::Value::from(links.to_vec()).to_string()
}

#[derive(Debug)]
pub struct Object {
    pub text: &'static str,
    /// Forty hexadecimal digits.
    pub build_id: &'static str,
    pub compiler: &'static str,
    pub rpath: Option<&'static str>,
    /// If set, the object's symbol is named `GLIBC_` and this version. The doctor then finds that
    /// the object requires this version of glibc.
    pub glibc: Option<&'static str>,
}

impl Object {
    pub fn new() -> Self {
        let compiler = "GCC: (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0";
        Self {
            text: "x",
            build_id: "00000000000000000000000000000000000000aa",
            compiler,
            rpath: None,
            glibc: None,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        static KNOWN: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::new(BTreeMap::new());
        let key = format!("{self:?}");
        let mut known = KNOWN.lock().unwrap();
        known
            .entry(key)
            .or_insert_with(|| {
                let folder = tempfile::tempdir().unwrap();
                let file = folder.path().join("lib.so");
                self.compile(&file);
                fs::read(file).unwrap()
            })
            .clone()
    }

    fn compile(&self, to: &Path) {
        let name = self
            .glibc
            .map_or("a_symbol".to_owned(), |version| format!("GLIBC_{version}"));
        let source = format!(
            "const char text[] = \"{}\"; void {}(void) {{}} __asm__(\".ident \\\"{}\\\"\");",
            self.text,
            name.replace('.', "_DOT_"),
            self.compiler
        );
        let mut command = Command::new("cc");
        command
            .args(["-shared", "-nostdlib", "-fno-ident", "-x", "c", "-", "-o"])
            .arg(to);
        command.arg(format!("-Wl,--build-id=0x{}", self.build_id));
        if let Some(rpath) = self.rpath {
            command.arg(format!("-Wl,--disable-new-dtags,-rpath,{rpath}"));
        }
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(source.as_bytes())
            .unwrap();
        assert!(child.wait().unwrap().success(), "{source}");
        let mut bytes = fs::read(to).unwrap();
        // Set e_machine to EM_AARCH64.
        bytes[18..20].copy_from_slice(&183_u16.to_le_bytes());
        let from = name.replace('.', "_DOT_");
        let wanted = name.clone();
        if let Some(at) =
            memchr::memmem::find(&bytes, from.as_bytes()).filter(|_| self.glibc.is_some())
        {
            bytes[at..at + wanted.len()].copy_from_slice(wanted.as_bytes());
            bytes[at + wanted.len()] = 0;
        }
        fs::write(to, bytes).unwrap();
    }
}
