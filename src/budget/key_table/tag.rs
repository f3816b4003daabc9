//! What identifies a key in the table, and what a cell tells the lease manager.

use crate::limit::Key;

/// A key's tag, and the groups that it may live in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::budget) struct Tag {
    /// Never 0.
    pub(in crate::budget) tag: u64,
    pub(super) place: u64,
}

impl Tag {
    /// Belongs to no key.
    pub(in crate::budget) const NONE: Tag = Tag { tag: 0, place: 0 };

    /// The tag of a key under one of its limit's quotas. Tiers lease separately, because the store
    /// applies different terms to each.
    pub(in crate::budget) fn new(key: Key, tier: usize) -> Tag {
        let low = key.0 as u64;
        let tier = (tier as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Tag {
            tag: (low ^ tier).max(1),
            place: (key.0 >> 64) as u64 ^ tier,
        }
    }
}

/// A cell needs the lease manager: its tokens are low, or a slot was returned to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::budget) struct CellNotice {
    /// The index of the cell.
    pub(in crate::budget) place: usize,
    /// Its key.
    pub(in crate::budget) tag: Tag,
}
