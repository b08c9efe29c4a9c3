//! The GID table of a port, whose addresses may leave and return while programs use them.
//!
//! Linux clears a NIC's entry as soon as the interface loses the address, under live queue pairs
//! (`del_gid` in drivers/infiniband/core/cache.c, `mlx5_ib_del_gid` in hw/mlx5/main.c). From then
//! on the entry reads as empty, and the packets of a queue pair that uses it get no answers. The
//! entry stays taken while a queue pair holds it (`put_gid_entry` in cache.c), so a returning
//! address gets another index. Here it always does. The contexts of the device get
//! `IBV_EVENT_GID_CHANGE` (`Node::watch_ports`). `tests/paths.rs` shows this.
//!
//! All addresses leave together, as when a network manager sets an interface up again. mlx5 then
//! keeps the link-local entry of the hardware address, which no longer answers.

/// Number of a table's entries.
pub const ENTRIES: usize = 16;

/// Largest number of a port's addresses (`Profile::gids`).
const ADDRESSES: usize = 2;
/// In place of an index: the address is not in the table.
const ABSENT: u8 = u8::MAX;

/// Indices of a port's addresses. Zero is the table of a port whose addresses never left: address N
/// has index N. In other tables, a byte for each address has its index, and the last byte is the
/// last index that was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GidTable(u32);

impl GidTable {
    pub(crate) fn from_word(word: u32) -> Self {
        Self(word)
    }

    pub(crate) fn word(self) -> u32 {
        self.0
    }

    /// Returns the index of the port's address with this number.
    pub fn index_of(self, address: usize) -> Option<usize> {
        let index = match self.0.to_le_bytes()[address.min(ADDRESSES - 1)] {
            _ if self.0 == 0 => address,
            index => usize::from(index),
        };
        (index < ENTRIES).then_some(index)
    }

    /// Returns the number of the address at an index; `None` for an empty entry.
    pub fn address_at(self, index: usize) -> Option<usize> {
        (0..ADDRESSES).find(|address| self.index_of(*address) == Some(index))
    }

    /// Returns true if the port has its addresses.
    pub fn has_addresses(self) -> bool {
        self.index_of(0).is_some()
    }

    /// Returns the table without addresses, or with all of them at the next indices.
    #[must_use]
    pub fn with_addresses(self, is_there: bool) -> Self {
        if self.has_addresses() == is_there {
            return self;
        }
        let [_, _, _, last] = self.0.to_le_bytes();
        let last = last.max(ADDRESSES as u8 - 1);
        if !is_there {
            return Self(u32::from_le_bytes([ABSENT, ABSENT, 0, last]));
        }
        let first = if usize::from(last) + ADDRESSES < ENTRIES {
            last + 1
        } else {
            0
        };
        Self(u32::from_le_bytes([first, first + 1, 0, first + 1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_return_at_other_indices() {
        let mut table = GidTable::default();
        let mut places = Vec::new();
        for _ in 0..10 {
            let place = [0, 1].map(|address| table.index_of(address).unwrap());
            assert_eq!(
                place.map(|index| table.address_at(index)),
                [Some(0), Some(1)]
            );
            assert_eq!(table.with_addresses(true), table);
            places.push(place[0]);
            let without = table.with_addresses(false);
            assert_eq!(without.with_addresses(false), without);
            assert!((0..ENTRIES).all(|index| without.address_at(index).is_none()));
            table = without.with_addresses(true);
            assert!(place.map(|index| table.address_at(index)) == [None, None]);
        }
        assert_eq!(places, [0, 2, 4, 6, 8, 10, 12, 14, 0, 2]);
    }
}
