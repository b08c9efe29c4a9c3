//! The plugin's device as a rank uses it: its properties, and the connections with other ranks.

use crate::net::{Context, Handle, Listener, RecvComm, SendComm};
use crate::ranks::activity;
use crate::ranks::log;
use anyhow::{Result, anyhow, ensure};
use nccl_abi::net::HANDLE_BYTES;
use serde::{Deserialize, Serialize};
use std::rc::Rc;

/// The device that NCCL would use first; this plugin has no other.
pub(crate) const DEVICE: i32 = 0;

/// The plugin's network as NCCL would see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Name of the network.
    pub name: String,
    /// Name of device 0.
    pub device: String,
    /// Number of devices.
    pub devices: i32,
    /// Speed of device 0 in Mb/s.
    pub speed_mbps: i32,
    /// The lines that the plugin has logged about its merged rails since its start.
    pub rails: Vec<String>,
}

/// Reads the network as NCCL would see it.
///
/// # Errors
/// Fails when the plugin has no device that takes host memory.
pub fn examine(context: &Context) -> Result<Network> {
    let devices = context.devices()?;
    ensure!(devices > 0, "the plugin has no device");
    let properties = context.properties(DEVICE)?;
    ensure!(
        properties.host_memory,
        "device {} does not take host memory",
        properties.name
    );
    Ok(Network {
        name: context.network(),
        device: properties.name,
        devices,
        speed_mbps: properties.speed_mbps,
        rails: log::take_rail_lines(),
    })
}

/// Listens for `count` connections. Returns the listeners, and their handles for the peers.
pub fn listen(context: &Rc<Context>, count: usize) -> Result<(Vec<Listener>, Vec<Vec<u8>>)> {
    let made = (0..count)
        .map(|_| context.listen(DEVICE))
        .collect::<Result<Vec<_>>>()?;
    Ok(made
        .into_iter()
        .map(|(listener, handle)| (listener, handle.to_vec()))
        .unzip())
}

/// Converts the bytes of handles that the peers sent.
///
/// # Errors
/// Fails when a handle has the wrong length.
pub fn handles(bytes: Vec<Vec<u8>>) -> Result<Vec<Handle>> {
    let handles = bytes
        .into_iter()
        .map(Handle::try_from)
        .collect::<Result<Vec<_>, _>>();
    handles.map_err(|_| anyhow!("a handle does not have {HANDLE_BYTES} bytes"))
}

/// Connects to all `handles` and accepts from all `listeners` in turns, as NCCL does. If every rank
/// completed its own connections before it accepted any, all ranks would wait for each other.
///
/// # Errors
/// The plugin's error, with the index of the failed handle or listener.
pub fn connect(
    context: &Rc<Context>,
    listeners: &[Listener],
    mut handles: Vec<Handle>,
) -> Result<(Vec<SendComm>, Vec<RecvComm>), (usize, anyhow::Error)> {
    let mut sends: Vec<Option<SendComm>> = handles.iter().map(|_| None).collect();
    let mut receives: Vec<Option<RecvComm>> = listeners.iter().map(|_| None).collect();
    while sends.iter().any(Option::is_none) || receives.iter().any(Option::is_none) {
        for (number, send) in sends
            .iter_mut()
            .enumerate()
            .filter(|(_, send)| send.is_none())
        {
            *send = context
                .connect(DEVICE, &mut handles[number])
                .map_err(|error| (number, error))?;
            send.iter().for_each(|_| activity::tick());
        }
        for (number, receive) in receives
            .iter_mut()
            .enumerate()
            .filter(|(_, receive)| receive.is_none())
        {
            *receive = listeners[number]
                .accept()
                .map_err(|error| (number, error))?;
            receive.iter().for_each(|_| activity::tick());
        }
        std::thread::yield_now();
    }
    Ok((
        sends.into_iter().flatten().collect(),
        receives.into_iter().flatten().collect(),
    ))
}
