//! The page of a caller's own quotas: its name, its limit and its methods.

use std::{num::NonZeroU64, time::Duration};

use http::{HeaderValue, Method};

use crate::{
    config,
    identity::KeyPart,
    limit::{Algorithm, Quota},
    response::Refusal,
};

/// What the page is called where routes and limits are; not a name that a configuration can give.
pub(super) const NAME: &str = "(status)";

/// How often one address may ask: once a second, and ten times at once.
pub(super) fn limit() -> config::Limit {
    const TEN: NonZeroU64 = NonZeroU64::new(10).expect("ten is not zero");
    let quota = Quota {
        amount: NonZeroU64::MIN,
        period: Duration::from_secs(1),
        burst: TEN,
    };
    config::Limit::new(NAME, vec![KeyPart::Ip], Algorithm::TokenBucket, vec![quota])
}

/// Whether the page takes this method.
pub(super) fn takes(method: &Method) -> Result<(), Refusal> {
    match *method {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(Refusal::MethodNotAllowed {
            allow: HeaderValue::from_static("GET, HEAD"),
        }),
    }
}
