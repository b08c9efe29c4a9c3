//! The folder of a user's fabrics. Other users can write to `/dev/shm`, so a folder there may be
//! theirs: a process that used such a folder would map memory that they can change, and load the
//! libraries to which they link.

use crate::os::process::user;
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const SHARED_MEMORY: &str = "/dev/shm";
const CURE: &str = "remove it, or name another folder with SOFTVERBS_DIR";
const WRITABLE_BY_OTHERS: u32 = 0o022;
const OPEN_TO_OTHERS: u32 = 0o077;

/// Returns this user's folder, and creates it if it is missing. The folder is in `runtime_dir`
/// (`XDG_RUNTIME_DIR`) if that is a folder of this user, else in `/dev/shm`.
///
/// # Errors
/// Fails when the folder cannot be created, or [`check`] refuses it.
pub fn create(runtime_dir: Option<&Path>) -> Result<PathBuf, String> {
    create_in(runtime_dir, Path::new(SHARED_MEMORY))
}

fn create_in(runtime_dir: Option<&Path>, shared: &Path) -> Result<PathBuf, String> {
    let usable = runtime_dir.filter(|folder| folder.is_absolute() && check(folder).is_ok());
    if let Some(folder) = usable.map(|folder| folder.join("softverbs"))
        && create_private(&folder).is_ok()
    {
        return Ok(folder);
    }
    let folder = shared.join(format!("softverbs-{}", user()));
    create_private(&folder)?;
    Ok(folder)
}

/// Checks that `path` is a folder and no symbolic link, belongs to this user, and is writable by no
/// other user. Then only this user and root can replace the folder or its files.
///
/// # Errors
/// Names the rule that `path` breaks, and the owner.
pub fn check(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let found = fs::symlink_metadata(path).map_err(|error| format!("{shown}: {error}"))?;
    let owner = name(found.uid());
    if found.is_symlink() {
        return Err(format!(
            "{shown} is a symbolic link of {owner}, not a folder: {CURE}"
        ));
    }
    if !found.is_dir() {
        return Err(format!(
            "{shown} is a file of {owner}, not a folder: {CURE}"
        ));
    }
    if found.uid() != user() {
        return Err(format!(
            "{shown} belongs to {owner}, not to {}: {CURE}",
            name(user())
        ));
    }
    if found.mode() & WRITABLE_BY_OTHERS != 0 {
        let mode = found.mode() & 0o7777;
        return Err(format!(
            "{shown}, which belongs to {owner}, is writable by others (mode {mode:04o}): {CURE}"
        ));
    }
    Ok(())
}

fn create_private(folder: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => check(folder)?,
    }
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(folder)
        .map_err(failed)?;
    // Earlier versions created the folder with mode 0755.
    if opened.metadata().map_err(failed)?.mode() & OPEN_TO_OTHERS != 0 {
        opened
            .set_permissions(Permissions::from_mode(0o700))
            .map_err(failed)?;
    }
    Ok(())
}

/// Returns the name of a user, or the number if the user has no name in `/etc/passwd`.
fn name(uid: u32) -> String {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    });
    named.map_or_else(
        || format!("uid {uid}"),
        |name| format!("{name} (uid {uid})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    const NOBODY: u32 = 65534;

    /// A folder in place of `/dev/shm`, and this user's path in it.
    fn shared(name: &str) -> (PathBuf, PathBuf) {
        let shared =
            Path::new("/tmp/softverbs-tests").join(format!("own-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&shared);
        fs::create_dir_all(&shared).unwrap();
        let own = shared.join(format!("softverbs-{}", user()));
        (shared, own)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[track_caller]
    fn assert_refused(shared: &Path, named: &[&str]) {
        let error = create_in(None, shared).unwrap_err();
        assert!(
            named.iter().all(|text| error.contains(text)) && !error.contains('\n'),
            "{error}"
        );
        fs::remove_dir_all(shared).unwrap();
    }

    #[test]
    fn the_folder_is_closed_to_others() {
        let (shared, own) = shared("new");
        assert_eq!(create_in(None, &shared), Ok(own.clone()));
        assert_eq!(mode(&own), 0o700);
        fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(create_in(None, &shared), Ok(own.clone()));
        assert_eq!(
            mode(&own),
            0o700,
            "the mode of an older folder is corrected"
        );
        fs::remove_dir_all(shared).unwrap();
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let (shared, own) = shared("foreign");
        fs::create_dir(&own).unwrap();
        // Only root can give files away.
        if chown(&own, Some(NOBODY), None).is_err() {
            return fs::remove_dir_all(shared).unwrap();
        }
        assert_refused(
            &shared,
            &["belongs to ", "uid 65534), not to ", "SOFTVERBS_DIR"],
        );
    }

    #[test]
    fn a_link_is_refused_even_to_a_folder_of_this_user() {
        let (shared, own) = shared("link");
        fs::create_dir_all(shared.join("target")).unwrap();
        symlink(shared.join("target"), &own).unwrap();
        let owner = name(user());
        assert_refused(&shared, &["is a symbolic link of ", &owner]);
    }

    #[test]
    fn a_file_and_a_folder_that_others_may_write_are_refused() {
        let (shared, own) = self::shared("file");
        fs::write(&own, "").unwrap();
        assert_refused(&shared, &["is a file of "]);
        let (shared, own) = self::shared("open");
        fs::create_dir(&own).unwrap();
        fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
        assert_refused(&shared, &["is writable by others (mode 0777)"]);
    }

    #[test]
    fn the_runtime_folder_comes_first_if_it_is_this_users() {
        let (shared, own) = shared("runtime");
        let runtime = shared.join("run");
        assert_eq!(
            create_in(Some(&runtime), &shared),
            Ok(own.clone()),
            "it is missing"
        );
        fs::create_dir(&runtime).unwrap();
        fs::set_permissions(&runtime, Permissions::from_mode(0o777)).unwrap();
        assert_eq!(
            create_in(Some(&runtime), &shared),
            Ok(own),
            "others may write to it"
        );
        fs::set_permissions(&runtime, Permissions::from_mode(0o700)).unwrap();
        let inner = runtime.join("softverbs");
        assert_eq!(create_in(Some(&runtime), &shared), Ok(inner.clone()));
        assert_eq!(mode(&inner), 0o700);
        fs::remove_dir_all(shared).unwrap();
    }

    #[test]
    fn users_have_names_or_numbers() {
        assert_eq!(name(4_000_000_000), "uid 4000000000");
        assert!(name(0).ends_with("(uid 0)"));
    }
}
