//! The status page, which shows callers their own quotas: its name, its limit and its methods.

use std::{num::NonZeroU64, time::Duration};

use http::{HeaderValue, Method};

use crate::{
    config,
    identity::KeyPart,
    limit::{Algorithm, Quota},
    response::Refusal,
};

/// The page's name among routes and limits. Configurations cannot use it.
pub(super) const NAME: &str = "(status)";

/// The page's limit per address: one request a second, with a burst of ten.
pub(super) fn limit() -> config::LimitSettings {
    const TEN: NonZeroU64 = NonZeroU64::new(10).expect("ten is not zero");
    let quota = Quota {
        amount: NonZeroU64::MIN,
        period: Duration::from_secs(1),
        burst: TEN,
    };
    config::LimitSettings::new(NAME, vec![KeyPart::Ip], Algorithm::TokenBucket, vec![quota])
}

/// 405 unless the page supports this method.
pub(super) fn takes(method: &Method) -> Result<(), Refusal> {
    match *method {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(Refusal::MethodNotAllowed {
            allow: HeaderValue::from_static("GET, HEAD"),
        }),
    }
}
