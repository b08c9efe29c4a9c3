//! A folder tree like sysfs for a machine of a profile.

use super::{MOST_MTU_BYTES, Profile};
use crate::gid_table;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

impl Profile {
    /// Writes the files that programs read in `/sys`: the network interfaces with their ports, and
    /// the RDMA devices with their PCIe links.
    pub fn write_sysfs(&self, root: &Path) -> Result<(), String> {
        for (index, rail) in self.rails.iter().enumerate() {
            let link = &self.links[rail.link];
            let domain = link.pci.split(':').next().unwrap_or("0000");
            let function = root.join(format!(
                "devices/pci{domain}:00/{}.{}",
                link.pci, rail.function
            ));
            let infiniband = function.join("infiniband").join(&rail.name);
            let net = function.join("net").join(&rail.netdev);
            let speed = format!("{:.1} GT/s PCIe\n", link.gts);
            for name in ["current_link_speed", "max_link_speed"] {
                put(&function.join(name), &speed)?;
            }
            for name in ["current_link_width", "max_link_width"] {
                put(&function.join(name), &format!("{}\n", link.width))?;
            }
            put(
                &net.join("phys_port_name"),
                &format!("{}\n", rail.phys_port),
            )?;
            put(&net.join("phys_switch_id"), "5f5f5f5f5f5f\n")?;
            // Headers need room: an interface MTU of 1500 gives a path MTU of 1024.
            let netdev_mtu = if rail.mtu_bytes == MOST_MTU_BYTES {
                9000
            } else {
                rail.mtu_bytes + 476
            };
            put(&net.join("mtu"), &format!("{netdev_mtu}\n"))?;
            put(&net.join("dev_port"), "0\n")?;
            put(&infiniband.join("sys_image_guid"), "5f5f:5f00:0000:0001\n")?;
            put(
                &infiniband.join("node_guid"),
                &format!("5f5f:5f00:0000:{:04x}\n", index + 1),
            )?;
            // In Linux, the file of an empty entry cannot be read.
            let gids = infiniband.join("ports/1/gid_attrs");
            for index in 0..gid_table::ENTRIES {
                put(&gids.join(format!("types/{index}")), "RoCE v2\n")?;
                put(
                    &gids.join(format!("ndevs/{index}")),
                    &format!("{}\n", rail.netdev),
                )?;
            }
            link_to(&infiniband.join("device"), &function)?;
            link_to(&net.join("device"), &function)?;
            link_to(&root.join("class/infiniband").join(&rail.name), &infiniband)?;
            link_to(&root.join("class/net").join(&rail.netdev), &net)?;
            link_to(
                &root
                    .join("bus/pci/devices")
                    .join(format!("{}.{}", link.pci, rail.function)),
                &function,
            )?;
        }
        Ok(())
    }

    /// Adds or removes a rail's RDMA device. A new entry has a new inode, as in sysfs.
    pub fn show_device(&self, root: &Path, rail: usize, is_there: bool) -> Result<(), String> {
        let class = root.join("class/infiniband");
        let rail = &self.rails[rail];
        let entry = class.join(&rail.name);
        let link = &self.links[rail.link];
        let domain = link.pci.split(':').next().unwrap_or("0000");
        let function = root.join(format!(
            "devices/pci{domain}:00/{}.{}",
            link.pci, rail.function
        ));
        match is_there {
            _ if !class.exists() => Ok(()),
            true if entry.symlink_metadata().is_err() => {
                link_to(&entry, &function.join("infiniband").join(&rail.name))
            }
            false => match entry.symlink_metadata() {
                // The entry is moved, not deleted: a file system may give a deleted file's inode to
                // the next file.
                Ok(found) => {
                    let removed = root.join("removed");
                    let kept = removed.join(format!("{}-{}", rail.name, found.ino()));
                    std::fs::create_dir_all(&removed)
                        .and_then(|()| std::fs::rename(&entry, kept))
                        .map_err(|error| format!("{}: {error}", entry.display()))
                }
                Err(_) => Ok(()),
            },
            true => Ok(()),
        }
    }
}

fn put(file: &Path, text: &str) -> Result<(), String> {
    let folder = file.parent().unwrap_or(file);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(file, text))
        .map_err(|e| format!("{}: {e}", file.display()))
}

fn link_to(place: &Path, target: &Path) -> Result<(), String> {
    let folder = place.parent().unwrap_or(place);
    let made =
        std::fs::create_dir_all(folder).and_then(|()| std::os::unix::fs::symlink(target, place));
    match made {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(format!("{}: {e}", place.display()))
        }
        _ => Ok(()),
    }
}
