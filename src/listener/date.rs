//! The `Date` of responses (RFC 9110 §6.6.1), formatted once a second.

use std::{
    cell::RefCell,
    time::{SystemTime, UNIX_EPOCH},
};

use http::HeaderValue;

thread_local! {
    /// The last formatted second since 1970, and its text.
    static WRITTEN: RefCell<Option<(u64, HeaderValue)>> = const { RefCell::new(None) };
}

/// The current time as a field value.
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
                HeaderValue::from_maybe_shared(text).expect("a date has only visible characters");
            written.insert((second, value)).1.clone()
        }
    })
}
