//! A table of fields that is over, kept for the next response.
//!
//! A request's table is done with in the very moment in which its response leaves. hyper keeps the response's for the
//! connection's next request, so tables go round, and none is allocated.

use std::cell::RefCell;

use http::HeaderMap;

/// A larger table is let go of.
const MAX_KEPT_FIELDS: usize = 64;

/// Room for the fields of one response. One for each worker.
#[derive(Debug, Default)]
pub struct SpareTable(RefCell<HeaderMap>);

impl SpareTable {
    /// An empty table with room for so many fields.
    pub(super) fn take(&self, fields: usize) -> HeaderMap {
        let mut table = self.0.take();
        table.reserve(fields);
        table
    }

    /// Keeps a table that nobody needs any more, where there is none.
    pub fn keep(&self, mut table: HeaderMap) {
        let mut kept = self.0.borrow_mut();
        if kept.capacity() == 0 && table.capacity() <= MAX_KEPT_FIELDS {
            table.clear();
            *kept = table;
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn table(fields: usize) -> HeaderMap {
        let field = |at| {
            let name = HeaderName::try_from(format!("x-{at}")).expect("a name");
            (name, HeaderValue::from(at))
        };
        (0..fields).map(field).collect()
    }

    #[test]
    fn a_table_comes_back_empty_and_with_its_room() {
        let spare = SpareTable::default();
        spare.keep(table(20));
        let again = spare.take(3);
        assert!(again.is_empty() && again.capacity() >= 20);
        assert!(spare.take(3).capacity() < 20, "it is given once");
    }

    #[test]
    fn a_large_table_is_not_kept() {
        let spare = SpareTable::default();
        spare.keep(table(100));
        assert!(spare.take(1).capacity() < 100);
    }
}
