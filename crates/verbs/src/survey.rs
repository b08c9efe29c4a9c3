//! The survey of this host: verbs reports the ports, and [`host::rails`] chooses the rails.

use super::context::Context;
use super::library::Library;
use host::config::{Config, RailConfig};
use host::error::{Error, Missing, Result};
use host::interfaces;
use host::rails::{self, PortFacts, Survey};
use std::path::Path;
use std::sync::Arc;

/// Surveys this host and the rails that the plugin would merge, with the settings of the
/// environment.
///
/// # Errors
/// [`Error::Setting`] for an invalid setting; [`Error::Missing`] without a verbs library or a
/// device that can be opened.
pub fn survey() -> Result<Survey> {
    let config = Config::from_environment()?.rails;
    OpenPorts::new(&config.verbs_library)?.survey(&config)
}

/// The ports of all devices that this process may open. Keeps the devices open.
pub struct OpenPorts {
    ports: Vec<(PortFacts, Arc<Context>)>,
    /// Devices and ports that cannot be used, each with the reason.
    unusable: Vec<String>,
    /// Devices that the container's rules exclude.
    others_devices: Vec<String>,
}

impl OpenPorts {
    /// Opens every device and queries its ports. `verbs_library` is a value of `NCCL_IBVERBS_LIB`.
    ///
    /// # Errors
    /// [`Error::Missing`] without a verbs library or a device that can be opened.
    pub fn new(verbs_library: &str) -> Result<Self> {
        let mut open = Self {
            ports: Vec::new(),
            unusable: Vec::new(),
            others_devices: Vec::new(),
        };
        for device in Library::load(verbs_library)?.devices()? {
            match device.open() {
                Ok(context) => open.add(device.guid(), &context),
                // The container's device rules exclude this device.
                Err(
                    error @ Error::Os {
                        errno: libc::EPERM, ..
                    },
                ) => open.others_devices.push(error.to_string()),
                Err(error) => open.unusable.push(error.to_string()),
            }
        }
        if open.ports.is_empty() {
            open.unusable.append(&mut open.others_devices);
            return Err(Missing::Device(open.unusable).into());
        }
        Ok(open)
    }

    fn add(&mut self, guid: u64, context: &Arc<Context>) {
        for port in 1..=context.ports() {
            let device = context.name().to_owned();
            let queried = context
                .port(port)
                .and_then(|info| Ok((info, context.gid_table(port)?)));
            match queried {
                Ok((info, gids)) => {
                    let facts = PortFacts {
                        device,
                        guid,
                        port,
                        info,
                        gids,
                    };
                    self.ports.push((facts, Arc::clone(context)));
                }
                Err(error) => self
                    .unusable
                    .push(format!("{device}:{port} not used as a rail: {error}")),
            }
        }
    }

    /// Returns the ports' properties.
    pub fn facts(&self) -> Vec<PortFacts> {
        self.ports.iter().map(|(facts, _)| facts.clone()).collect()
    }

    /// Returns the device of a port.
    pub fn context(&self, device: &str, port: u8) -> Option<&Arc<Context>> {
        self.ports
            .iter()
            .find(|(facts, _)| facts.device == device && facts.port == port)
            .map(|(_, context)| context)
    }

    /// Logs each device and port that cannot be used, with the reason.
    pub fn log_unusable(&self) {
        for text in &self.unusable {
            tracing::warn!("{text}");
        }
        for text in &self.others_devices {
            tracing::info!("{text}");
        }
    }

    /// Chooses the rails among the ports.
    ///
    /// # Errors
    /// [`Error::Setting`] without sysfs, [`Error::Os`] if the interfaces cannot be listed.
    pub fn survey(&self, config: &RailConfig) -> Result<Survey> {
        rails::check_sysfs(&config.sysfs)?;
        Ok(rails::survey(
            &config.sysfs,
            Path::new("/proc/sys"),
            &self.facts(),
            &interfaces::all()?,
            &config.hca,
        ))
    }
}
