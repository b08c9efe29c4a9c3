//! The mapped files of a running process.

use crate::commands::doctor::place::Place;
use std::path::PathBuf;

#[derive(Debug, Clone, Default)]
pub struct Process {
    pub pid: u32,
    pub maps: Vec<PathBuf>,
}

impl Process {
    /// Reads the mapped files of process `pid`.
    ///
    /// # Errors
    /// The process belongs to another user, or does not exist.
    pub fn read(place: &Place, pid: u32) -> std::io::Result<Self> {
        let bytes = std::fs::read(place.path(format!("/proc/{pid}/maps")))?;
        let text = String::from_utf8_lossy(&bytes);
        let mut maps: Vec<PathBuf> = Vec::new();
        // Fields: address perms offset dev inode path (proc_pid_maps(5)). Paths may have spaces.
        for line in text.lines() {
            let path = line
                .find('/')
                .map(|at| line[at..].trim_end_matches(" (deleted)"));
            if let Some(path) = path.map(PathBuf::from).filter(|path| !maps.contains(path)) {
                maps.push(path);
            }
        }
        Ok(Self { pid, maps })
    }

    pub fn mapped(&self, start: &str) -> Vec<PathBuf> {
        let begins = |path: &&PathBuf| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(start))
        };
        self.maps.iter().filter(begins).cloned().collect()
    }
}
