//! The slots that an admitted request holds until its response ends.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::{CellNotice, KeyTable, Tag};

/// Slots that an admitted request holds. Dropping it returns them.
#[derive(Debug)]
pub struct SlotGuard {
    key_table: Arc<KeyTable>,
    notices: mpsc::Sender<CellNotice>,
    place: usize,
    tag: Tag,
    cost: u64,
    alone: bool,
}

impl SlotGuard {
    /// Guards slots just taken from this cell; `alone` if they were taken without a grant.
    pub(in crate::budget) fn new(
        (key_table, notices): (&Arc<KeyTable>, &mpsc::Sender<CellNotice>),
        (place, tag): (usize, Tag),
        cost: u64,
        alone: bool,
    ) -> SlotGuard {
        SlotGuard {
            key_table: Arc::clone(key_table),
            notices: notices.clone(),
            place,
            tag,
            cost,
            alone,
        }
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let slots = self.key_table.slots(self.place);
        if slots.come_back(self.cost, self.alone) {
            let (place, tag) = (self.place, self.tag);
            // if the queue is full, the lease manager's next declaration finds out
            let _ = self.notices.try_send(CellNotice { place, tag });
        }
    }
}
