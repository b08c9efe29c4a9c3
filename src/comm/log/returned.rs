//! Settings that an interface may lose when its device is removed and returns: PFC on the priority
//! of the job's packets, and the MTU. They are read at start and some seconds after each return. A
//! WARN names a loss, because the rail still works, but slowly or with lost packets. A short-lived
//! thread reads them, because the driver of a device that has just returned may take long.

use crate::comm::threads::{self, lock};
use host::interfaces::qos;
use proto::time::Instant;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time from a return to the reading. What sets these values at boot also runs when the interface
/// appears, and takes a few seconds.
const SETTLED: Duration = Duration::from_secs(10);
/// Number of further readings if an interface cannot be read yet.
const TRIES: u32 = 3;

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
    /// The settings when they could last be read.
    before: Option<Settings>,
    /// Time of the next reading, after the device has returned, and the number of further tries.
    due: Option<(Instant, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Settings {
    /// Priority of the job's packets, if it has PFC.
    lossless: Option<u8>,
    mtu_bytes: u32,
}

impl ReturnedPorts {
    /// Reads the settings of the interfaces. `rails` has the name of each rail and of its
    /// interface. `sysfs` is the mount point of sysfs.
    pub fn new(
        sysfs: &Path,
        (traffic_class, service_level): (u8, u8),
        rails: impl Iterator<Item = (String, Option<String>)>,
    ) -> Self {
        let this = Self {
            sysfs: sysfs.to_owned(),
            traffic_class,
            service_level,
            ports: Mutex::default(),
        };
        let port = |(rail, netdev): (String, Option<String>)| {
            let before = netdev.as_deref().and_then(|netdev| this.read(netdev));
            Port {
                rail,
                netdev,
                before,
                due: None,
            }
        };
        *lock(&this.ports) = rails.map(port).collect();
        this
    }

    /// Records that the device of the rail with this number has returned.
    pub fn returned(&self, rail: usize, now: Instant) {
        if let Some(port) = lock(&self.ports).get_mut(rail) {
            port.due = Some((now + SETTLED, TRIES));
        }
    }

    /// Starts the readings that are due. The service thread calls this in each round.
    pub fn tick(self: &Arc<Self>, now: Instant) {
        let due = self.take_due(now);
        if !due.is_empty() {
            let this = Arc::clone(self);
            threads::detach("spark-returned", move || {
                this.compare(&due, now)
                    .iter()
                    .for_each(|text| tracing::warn!("{text}"));
            });
        }
    }

    /// Returns the numbers of the rails that are to be read now, and of further tries for each.
    fn take_due(&self, now: Instant) -> Vec<(usize, u32)> {
        let mut ports = lock(&self.ports);
        let mut take = |(number, port): (usize, &mut Port)| {
            let (_, tries) = port.due.take_if(|(due, _)| now >= *due)?;
            Some((number, tries))
        };
        ports.iter_mut().enumerate().filter_map(&mut take).collect()
    }

    /// Reads the interfaces of these rails. Returns a text for each setting that is lost.
    fn compare(&self, due: &[(usize, u32)], now: Instant) -> Vec<String> {
        let mut texts = Vec::new();
        for (number, tries) in due {
            let Some(netdev) = lock(&self.ports)
                .get(*number)
                .and_then(|port| port.netdev.clone())
            else {
                continue;
            };
            // Not under the lock: the call may take long.
            let read = self.read(&netdev);
            let port = &mut lock(&self.ports)[*number];
            match (read, port.before) {
                (Some(now), before) => {
                    port.before = Some(now);
                    texts.extend(
                        before
                            .into_iter()
                            .flat_map(|before| losses(&port.rail, &netdev, before, now)),
                    );
                }
                (None, _) => port.due = tries.checked_sub(1).map(|tries| (now + SETTLED, tries)),
            }
        }
        texts
    }

    /// Reads an interface. Returns `None` if it is not there or cannot be read.
    fn read(&self, netdev: &str) -> Option<Settings> {
        let mtu = std::fs::read_to_string(self.sysfs.join("class/net").join(netdev).join("mtu"));
        // The interfaces of a software fabric have no priorities, even if this host has interfaces
        // of the same names.
        let is_real = self.sysfs == Path::new("/sys");
        let port = if is_real {
            qos::read(netdev).ok()?
        } else {
            None
        };
        let lossless = port.and_then(|port| {
            let priority = port.priority(self.traffic_class, self.service_level);
            port.has_pfc(priority).then_some(priority)
        });
        Some(Settings {
            lossless,
            mtu_bytes: mtu.ok()?.trim().parse().ok()?,
        })
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
    let before = before.mtu_bytes;
    let now = now.mtu_bytes;
    if now < before {
        texts.push(format!(
            "rail {rail}: its device is back with MTU {now} in place of {before}, so its packets are small; after the job: ip link \
             set {netdev} mtu {before}"
        ));
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    #[test]
    fn a_lost_mtu_is_named_once_after_the_interface_has_settled() {
        let sysfs = tempfile::tempdir().unwrap();
        let put = |mtu: &str| {
            let folder = sysfs.path().join("class/net/eth0");
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("mtu"), mtu).unwrap();
        };
        put("9000\n");
        let rails = [
            ("a:1".to_owned(), Some("eth0".to_owned())),
            ("b:1".to_owned(), None),
        ];
        let ports = ReturnedPorts::new(sysfs.path(), (106, 0), rails.into_iter());
        let due = |at: Instant| ports.compare(&ports.take_due(at), at);
        let start = clock::now();
        put("1500\n");
        assert_eq!(due(start + 2 * SETTLED), [""; 0], "nothing has returned");
        (0..3).for_each(|rail| ports.returned(rail, start));
        assert_eq!(due(start + SETTLED / 2), [""; 0]);
        let [text] = &due(start + SETTLED)[..] else {
            panic!("not one text")
        };
        let expected = "rail a:1: its device is back with MTU 1500 in place of 9000";
        assert!(text.starts_with(expected), "{text}");
        assert!(
            text.ends_with("after the job: ip link set eth0 mtu 9000"),
            "{text}"
        );
        ports.returned(0, start);
        assert_eq!(due(start + SETTLED), [""; 0], "it is known");
        // An interface that is not there yet is read again, and compared with the last reading.
        std::fs::remove_file(sysfs.path().join("class/net/eth0/mtu")).unwrap();
        ports.returned(0, start);
        assert_eq!(due(start + SETTLED), [""; 0]);
        put("1000\n");
        assert_eq!(due(start + 2 * SETTLED).len(), 1);
    }

    #[test]
    fn only_a_loss_is_named() {
        let of = |lossless, mtu_bytes| Settings {
            lossless,
            mtu_bytes,
        };
        let said = |before, now| losses("a:1", "eth0", before, now).join("\n");
        assert!(said(of(Some(3), 9000), of(None, 9000)).contains("without PFC on priority 3"));
        for (before, now) in [
            (of(Some(3), 9000), of(Some(3), 9000)),
            (of(None, 1500), of(Some(3), 9000)),
            (of(Some(3), 1500), of(Some(5), 1500)),
        ] {
            assert_eq!(said(before, now), "");
        }
    }
}
