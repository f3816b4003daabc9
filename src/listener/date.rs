//! The `Date` of answers (RFC 9110 §6.6.1), written once a second.

use std::{
    cell::RefCell,
    time::{SystemTime, UNIX_EPOCH},
};

use http::HeaderValue;

thread_local! {
    /// The second since 1970 that was written last, and what was written.
    static WRITTEN: RefCell<Option<(u64, HeaderValue)>> = const { RefCell::new(None) };
}

/// The time as a field's value.
pub(super) fn now() -> HeaderValue {
    let now = SystemTime::now();
    let second = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    WRITTEN.with_borrow_mut(|written| match written {
        Some((written_at, value)) if *written_at == second => value.clone(),
        written => {
            let text = httpdate::fmt_http_date(now);
            let value =
                HeaderValue::from_maybe_shared(text).expect("a date is made of visible characters");
            written.insert((second, value)).1.clone()
        }
    })
}
