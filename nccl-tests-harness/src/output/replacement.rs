//! Atomic replacement of a file: the new file is written in the same directory and then renamed, so
//! a reader sees the whole old file or the whole new one.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use tempfile::{Builder, NamedTempFile};

/// Creates an empty temporary file beside `path`. Errors do not contain the temporary file's name,
/// because that name is random.
pub fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let make = |path: &Path| {
        File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
    };
    Builder::new()
        .prefix(".nccl-spark-")
        .suffix(".tmp")
        .make_in(folder, make)
}

/// Writes a temporary file in the directory of `path`, and syncs it to disk.
/// [`NamedTempFile::persist`] renames it into place.
pub fn written(path: &Path, content: &[u8], permissions: Permissions) -> io::Result<NamedTempFile> {
    let mut file = beside(path)?;
    file.write_all(content)?;
    file.as_file().set_permissions(permissions)?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Writes `text` into `file`, and makes the file readable for all users.
pub fn fill(file: &mut NamedTempFile, text: &str) -> io::Result<()> {
    file.as_file_mut().write_all(text.as_bytes())?;
    file.as_file()
        .set_permissions(Permissions::from_mode(0o644))
}
