//! A used header map, kept for the next response.
//!
//! A request's header map is free at the moment when its response is sent. hyper reuses the
//! response's map for the connection's next request. So maps circulate without allocation.

use std::cell::RefCell;

use http::HeaderMap;

/// Larger maps are dropped.
const MAX_KEPT_FIELDS: usize = 64;

/// Spare header map for one response; one per worker.
#[derive(Debug, Default)]
pub struct SpareHeaderMap(RefCell<HeaderMap>);

impl SpareHeaderMap {
    /// An empty map with capacity for `fields`.
    pub(super) fn take(&self, fields: usize) -> HeaderMap {
        let mut table = self.0.take();
        table.reserve(fields);
        table
    }

    /// Keeps an unused map if there is none yet.
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
        let spare = SpareHeaderMap::default();
        spare.keep(table(20));
        let again = spare.take(3);
        assert!(again.is_empty() && again.capacity() >= 20);
        assert!(spare.take(3).capacity() < 20, "it is given once");
    }

    #[test]
    fn a_large_table_is_not_kept() {
        let spare = SpareHeaderMap::default();
        spare.keep(table(100));
        assert!(spare.take(1).capacity() < 100);
    }
}
