//! Settings of `[response]`.

use http::HeaderValue;

/// Settings of rate-limit fields and response bodies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseSettings {
    /// The field families to write.
    pub fields: FieldFamilies,
    /// The responses that carry them.
    pub on: FieldsOn,
    /// The body format of tidegate's own responses.
    pub body: BodyStyle,
    /// Whether limits on the costs of a provider answer in the form that its SDK reads.
    pub sdk: bool,
}

/// The families of rate-limit fields. `ratelimit` and `ratelimit_triple` exclude each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FieldFamilies {
    /// `RateLimit` and `RateLimit-Policy`, draft-11 syntax.
    pub ratelimit: bool,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset`.
    pub ratelimit_triple: bool,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Reset` (epoch seconds).
    pub x_ratelimit: bool,
    /// `x-ratelimit-limit-tokens` and its like.
    pub openai: bool,
    /// `anthropic-ratelimit-tokens-limit` and its like.
    pub anthropic: bool,
}

/// The responses that carry rate-limit fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldsOn {
    /// Every response.
    #[default]
    Always,
    /// Only rejections.
    Rejected,
}

impl FieldsOn {
    pub(super) fn shows(self, denied: bool) -> bool {
        denied || self == FieldsOn::Always
    }
}

/// The body format of tidegate's own responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BodyStyle {
    /// `application/problem+json`, RFC 9457.
    #[default]
    ProblemJson,
    /// `application/json`.
    Json,
    /// `text/plain`.
    Text,
}

impl BodyStyle {
    /// The media type of the body.
    pub fn content_type(self) -> HeaderValue {
        // constants, because creating a value validates each byte
        match self {
            BodyStyle::ProblemJson => {
                const { HeaderValue::from_static("application/problem+json") }
            }
            BodyStyle::Json => const { HeaderValue::from_static("application/json") },
            BodyStyle::Text => const { HeaderValue::from_static("text/plain; charset=utf-8") },
        }
    }
}
