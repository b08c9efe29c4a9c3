//! Settings that an interface may lose when its device is removed and returns: PFC on the priority
//! of the job's packets, and the MTU. They are read at start and some seconds after each return. A
//! WARN names a loss, because the rail still works, but slowly or with lost packets.

use crate::comm::threads::lock;
use crate::interfaces::qos;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time from a return to the reading. What sets these values at boot also runs when the interface
/// appears, and takes a few seconds.
const SETTLED: Duration = Duration::from_secs(10);

/// The interfaces of a process's rails.
#[derive(Debug)]
pub struct ReturnedPorts {
    sysfs: PathBuf,
    traffic_class: u8,
    service_level: u8,
    ports: Mutex<Vec<Port>>,
}

/// The interface of a rail.
#[derive(Debug)]
struct Port {
    rail: String,
    netdev: Option<String>,
    before: Settings,
    /// Time of the next reading, after the device has returned.
    due: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Settings {
    /// Priority of the job's packets, if it has PFC.
    lossless: Option<u8>,
    mtu_bytes: Option<u32>,
}

impl ReturnedPorts {
    /// Reads the settings of the interfaces. `rails` has the name of each rail and of its
    /// interface. `sysfs` is the mount point of sysfs.
    pub fn new(
        sysfs: &Path,
        (traffic_class, service_level): (u8, u8),
        rails: impl Iterator<Item = (String, Option<String>)>,
    ) -> Self {
        let this = Self { sysfs: sysfs.to_owned(), traffic_class, service_level, ports: Mutex::default() };
        let port = |(rail, netdev): (String, Option<String>)| {
            let before = netdev.as_deref().map_or_else(Settings::default, |netdev| this.read(netdev));
            Port { rail, netdev, before, due: None }
        };
        *lock(&this.ports) = rails.map(port).collect();
        this
    }

    /// Records that the device of the rail with this number has returned.
    pub fn returned(&self, rail: usize, now: Instant) {
        if let Some(port) = lock(&self.ports).get_mut(rail) {
            port.due = Some(now + SETTLED);
        }
    }

    /// Writes the warnings that are due. The service thread calls this in each round.
    pub fn tick(&self, now: Instant) {
        self.due(now).iter().for_each(|text| tracing::warn!("{text}"));
    }

    fn due(&self, now: Instant) -> Vec<String> {
        let mut texts = Vec::new();
        for port in lock(&self.ports).iter_mut().filter(|port| port.due.is_some_and(|due| now >= due)) {
            port.due = None;
            if let Some(netdev) = &port.netdev {
                let before = std::mem::replace(&mut port.before, self.read(netdev));
                texts.extend(losses(&port.rail, netdev, before, port.before));
            }
        }
        texts
    }

    fn read(&self, netdev: &str) -> Settings {
        let mtu = std::fs::read_to_string(self.sysfs.join("class/net").join(netdev).join("mtu"));
        // The interfaces of a software fabric have no priorities, even if this host has interfaces
        // of the same names.
        let is_real = self.sysfs == Path::new("/sys");
        let port = is_real.then(|| qos::read(netdev).ok().flatten()).flatten();
        Settings {
            lossless: port.and_then(|port| {
                let priority = port.priority(self.traffic_class, self.service_level);
                port.has_pfc(priority).then_some(priority)
            }),
            mtu_bytes: mtu.ok().and_then(|mtu| mtu.trim().parse().ok()),
        }
    }
}

/// Returns a text for each setting that is lost.
fn losses(rail: &str, netdev: &str, before: Settings, now: Settings) -> Vec<String> {
    let mut texts = Vec::new();
    if let (Some(priority), None) = (before.lossless, now.lossless) {
        texts.push(format!(
            "rail {rail}: its device is back without PFC on priority {priority}, so a switch may drop its packets; after the job, set \
             it again: switches.md"
        ));
    }
    if let (Some(before), Some(now)) = (before.mtu_bytes, now.mtu_bytes)
        && now < before
    {
        texts.push(format!(
            "rail {rail}: its device is back with MTU {now} in place of {before}, so its packets are small: ip link set {netdev} mtu {before}"
        ));
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_mtu_is_named_once_after_the_interface_has_settled() {
        let sysfs = tempfile::tempdir().unwrap();
        let put = |mtu: &str| {
            let folder = sysfs.path().join("class/net/eth0");
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("mtu"), mtu).unwrap();
        };
        put("9000\n");
        let rails = [("a:1".to_owned(), Some("eth0".to_owned())), ("b:1".to_owned(), None)];
        let ports = ReturnedPorts::new(sysfs.path(), (106, 0), rails.into_iter());
        let start = Instant::now();
        put("1500\n");
        assert_eq!(ports.due(start + 2 * SETTLED), [""; 0], "nothing has returned");
        (0..3).for_each(|rail| ports.returned(rail, start));
        assert_eq!(ports.due(start + SETTLED / 2), [""; 0]);
        let [text] = &ports.due(start + SETTLED)[..] else { panic!("not one text") };
        let expected = "rail a:1: its device is back with MTU 1500 in place of 9000";
        assert!(text.starts_with(expected) && text.ends_with("ip link set eth0 mtu 9000"), "{text}");
        ports.returned(0, start);
        assert_eq!(ports.due(start + SETTLED), [""; 0], "it is known");
    }

    #[test]
    fn only_a_loss_is_named() {
        let of = |lossless, mtu_bytes| Settings { lossless, mtu_bytes };
        let said = |before, now| losses("a:1", "eth0", before, now).join("\n");
        assert!(said(of(Some(3), None), of(None, None)).contains("without PFC on priority 3"));
        for (before, now) in [
            (of(Some(3), Some(9000)), of(Some(3), Some(9000))),
            (of(None, Some(1500)), of(Some(3), Some(9000))),
            (of(Some(3), None), of(Some(5), Some(1500))),
            (of(None, Some(9000)), of(None, None)),
        ] {
            assert_eq!(said(before, now), "");
        }
    }
}
