//! Reading and writing of little-endian fields in bounded buffers.

/// Error of decoding a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end within a field.
    #[error("message is truncated")]
    Short,
    /// Bytes follow the last field.
    #[error("{0} extra bytes")]
    Long(usize),
    /// A count or length is above its bound.
    #[error("{what}: {count}, at most {most} allowed")]
    Above {
        /// The field.
        what: &'static str,
        /// The count read.
        count: usize,
        /// The largest allowed count.
        most: usize,
    },
    /// The path MTU is not a valid value.
    #[error("path MTU {0} is not 256, 512, 1024, 2048 or 4096")]
    PathMtu(u32),
    /// A field's value is out of range.
    #[error("invalid {what} {value:#x}")]
    Value {
        /// The field.
        what: &'static str,
        /// The value read.
        value: u64,
    },
}

/// Reads fields from the front of a slice. The methods return [`Malformed::Short`] if the slice
/// ends within a field.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Creates a reader at the front of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads the next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (head, tail) = self.0.split_at_checked(count).ok_or(Malformed::Short)?;
        self.0 = tail;
        Ok(head)
    }

    /// Reads the next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(Malformed::Short)?;
        self.0 = tail;
        Ok(*head)
    }

    /// Reads a byte.
    pub fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Reads a 16-bit number.
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    /// Reads a 32-bit number.
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a 64-bit number.
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a 16-bit length and a text of this many bytes. The text is only for display: invalid
    /// UTF-8 and control characters become `?`. The result is never longer than the input.
    ///
    /// # Errors
    /// [`Malformed::Above`] if the length is above `most`, or [`Malformed::Short`].
    pub fn text(&mut self, what: &'static str, most: usize) -> Result<String, Malformed> {
        let count = usize::from(self.u16()?);
        if count > most {
            return Err(Malformed::Above { what, count, most });
        }
        let text = String::from_utf8_lossy(self.bytes(count)?).into_owned();
        let shown = |c: char| {
            if c.is_control() || c == char::REPLACEMENT_CHARACTER {
                '?'
            } else {
                c
            }
        };
        Ok(text.chars().map(shown).collect())
    }

    /// Reads an 8-bit count, and this number of items.
    ///
    /// # Errors
    /// [`Malformed::Above`] if the count is above `most`, [`Malformed::Short`] if the slice ends
    /// before the count, or the error of an item.
    pub fn list<T>(
        &mut self,
        what: &'static str,
        most: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = usize::from(self.u8()?);
        if count > most {
            return Err(Malformed::Above { what, count, most });
        }
        (0..count).map(|_| item(self)).collect()
    }

    /// Checks that all bytes have been read.
    ///
    /// # Errors
    /// [`Malformed::Long`] if bytes are left.
    pub fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed::Long(self.0.len()))
        }
    }
}

/// Appends fields to a buffer.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Appends raw bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends a byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    /// Appends a 16-bit number.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends a 32-bit number.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends a 64-bit number.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends a 16-bit length and the text, cut at a character boundary to `most` bytes. `most`
    /// must not exceed 65535. All callers pass constants, so this method does not check it.
    pub fn text(&mut self, text: &str, most: usize) -> &mut Self {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.u16(end as u16).bytes(&text.as_bytes()[..end])
    }

    /// Appends an 8-bit count and the items. Items after the 255th are dropped.
    pub fn list<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) -> &mut Self {
        let items = &items[..items.len().min(255)];
        self.u8(items.len() as u8);
        for each in items {
            item(self, each);
        }
        self
    }

    /// Returns the buffer.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_a_displayed_text_does_not_lengthen_it() {
        let mut writer = Writer::default();
        writer.u16(8).bytes(b"a\xff\n\xc3\xa9\xfe\xfd\x80");
        let text = Reader::new(&writer.into_bytes()).text("name", 8);
        assert_eq!(text.as_deref(), Ok("a??\u{e9}???"));
    }
}
