//! Build id, compilers, version strings and search paths of a shared library, read from its file.
//! The library is not loaded.

use crate::digest::hex;
use object::read::elf::{Dyn, FileHeader, SectionHeader};
use object::read::{ReadCache, ReadRef};
use object::{Architecture, Object, ObjectSection, elf};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Library {
    /// Build id in hexadecimal, or empty.
    pub build_id: String,
    pub compilers: Vec<String>,
    pub is_aarch64: bool,
    /// `DT_RPATH`: folders that the loader searches first. Ignored if the library has a `runpath`.
    pub rpath: Option<String>,
    /// `DT_RUNPATH`: folders that the loader searches after `LD_LIBRARY_PATH`.
    pub runpath: Option<String>,
    /// Newest glibc version that the library's symbols require, as in (2, 28).
    pub glibc: Option<(u32, u32)>,
    /// Texts of the section `.rodata` that begin with one of [`MARKS`].
    pub texts: BTreeSet<String>,
}

/// Prefixes of texts that identify libraries. A text ends before the first byte that is not
/// printable ASCII.
const MARKS: [&str; 4] = ["NCCL version ", "GNU C Library ", "spark-rails", "IBext"];

/// Reads a library's headers and texts.
///
/// # Errors
/// The file cannot be read, or is not a library.
pub fn read(path: &Path) -> Result<Library, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let data = ReadCache::new(file);
    let parsed = object::read::elf::ElfFile64::<object::Endianness, _>::parse(&data)
        .map_err(|error| error.to_string())?;
    let mut library = Library {
        build_id: parsed
            .build_id()
            .ok()
            .flatten()
            .map(hex)
            .unwrap_or_default(),
        is_aarch64: parsed.architecture() == Architecture::Aarch64,
        ..Library::default()
    };
    dynamic(&parsed, &mut library).map_err(|error| error.to_string())?;
    for section in parsed.sections() {
        match section.name() {
            Ok(".comment") => {
                let bytes = section.data().map_err(|error| error.to_string())?;
                let texts = bytes
                    .split(|byte| *byte == 0)
                    .filter(|text| !text.is_empty());
                library
                    .compilers
                    .extend(texts.map(|text| String::from_utf8_lossy(text).into_owned()));
            }
            Ok(".rodata") => {
                let bytes = section.data().map_err(|error| error.to_string())?;
                library
                    .texts
                    .extend(MARKS.iter().flat_map(|mark| texts(bytes, mark)));
            }
            _ => {}
        }
    }
    Ok(library)
}

impl Library {
    pub fn nccl_version(&self) -> Option<(String, [u32; 3])> {
        let versions = self.texts.iter().filter_map(|text| {
            let text = text.strip_prefix("NCCL version ")?;
            let numbers: Vec<u32> = text
                .split(['.', '+', '-'])
                .take(3)
                .map_while(|part| part.parse().ok())
                .collect();
            Some((text.to_owned(), <[u32; 3]>::try_from(numbers).ok()?))
        });
        // The file has the version with and without the CUDA suffix. Return the longer text.
        versions.max_by_key(|(text, _)| text.len())
    }

    pub fn libc_version(&self) -> Option<(u32, u32)> {
        let text = self
            .texts
            .iter()
            .find(|text| text.starts_with("GNU C Library "))?;
        glibc_version(text.split("version ").nth(1)?)
    }

    pub fn oldest_gcc(&self) -> Option<u32> {
        let major = |text: &String| {
            let last = text
                .strip_prefix("GCC: (")?
                .rsplit(')')
                .find(|part| !part.trim().is_empty())?;
            last.split_whitespace()
                .find_map(|word| word.split('.').next()?.parse().ok())
        };
        self.compilers.iter().filter_map(major).min()
    }
}

fn texts(bytes: &[u8], mark: &str) -> Vec<String> {
    let is_end = |byte: &u8| !(0x20..0x7f).contains(byte);
    let line = |at: usize| {
        let rest = &bytes[at..];
        let length = rest.iter().position(is_end).unwrap_or(rest.len());
        String::from_utf8_lossy(&rest[..length]).into_owned()
    };
    memchr::memmem::find_iter(bytes, mark.as_bytes())
        .map(line)
        .collect()
}

fn dynamic<'data, R: ReadRef<'data>>(
    file: &object::read::elf::ElfFile64<'data, object::Endianness, R>,
    library: &mut Library,
) -> object::Result<()> {
    let endian = file.endian();
    let header = file.elf_header();
    let data = file.data();
    let sections = header.sections(endian, data)?;
    let Some((entries, strings)) = sections.dynamic(endian, data)? else {
        return Ok(());
    };
    let strings = sections.strings(endian, data, strings)?;
    let text = |entry: &elf::Dyn64<object::Endianness>| {
        let bytes = entry.string(endian, strings).ok()?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    };
    for entry in entries {
        match entry.d_tag(endian) {
            elf::DT_RPATH => library.rpath = text(entry),
            elf::DT_RUNPATH => library.runpath = text(entry),
            _ => {}
        }
    }
    let dynstr = sections.iter().find(|section| {
        section.sh_type(endian) == elf::SHT_STRTAB && section.sh_flags(endian) != 0u64
    });
    let dynstr = dynstr
        .map(|section| section.data(endian, data))
        .transpose()?
        .unwrap_or_default();
    library.glibc = texts(dynstr, "GLIBC_")
        .iter()
        .filter_map(|name| glibc_version(name.strip_prefix("GLIBC_")?))
        .max();
    Ok(())
}

fn glibc_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compilers_version_is_the_last_number_of_its_line() {
        let gcc = |texts: &[&str]| {
            Library {
                compilers: texts.iter().map(|text| (*text).to_owned()).collect(),
                ..Library::default()
            }
            .oldest_gcc()
        };
        // From libnccl.so.2 of NVIDIA's wheel of 2.28.9.
        let wheel =
            "GCC: (GNU Toolchain for the A-profile Architecture 8.3-2019.03 (arm-rel-8.36)) 8.3.0";
        assert_eq!(
            gcc(&["GCC: (GNU) 8.5.0 20210514 (Red Hat 8.5.0-21)", wheel]),
            Some(8)
        );
        assert_eq!(gcc(&[wheel]), Some(8));
        assert_eq!(
            gcc(&["GCC: (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0"]),
            Some(13)
        );
        assert_eq!(gcc(&["clang version 18"]), None);
    }

    #[test]
    fn versions_are_read_from_texts() {
        let library = |texts: &[&str]| Library {
            texts: texts.iter().map(|text| (*text).to_owned()).collect(),
            ..Library::default()
        };
        let nccl = library(&[
            "NCCL version 2.28.9",
            "NCCL version 2.28.9+cuda13.0",
            "NCCL version %d",
        ]);
        assert_eq!(
            nccl.nccl_version(),
            Some(("2.28.9+cuda13.0".to_owned(), [2, 28, 9]))
        );
        let libc =
            library(&["GNU C Library (Ubuntu GLIBC 2.39-0ubuntu8.3) stable release version 2.39."]);
        assert_eq!(libc.libc_version(), Some((2, 39)));
        assert_eq!(
            texts(b"x\0NCCL version 2.1\nNCCL version 3\0", "NCCL version "),
            ["NCCL version 2.1", "NCCL version 3"]
        );
    }
}
