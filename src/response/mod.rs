//! Every answer that the gateway authors; the only place with status codes.

/// What clients are told about their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which families of fields are written.
    pub fields: FieldFamilies,
    /// On which responses.
    pub on: FieldsOn,
    /// How the body of our own answers is written.
    pub body: BodyStyle,
}

/// The families of rate-limit fields; `RateLimit` and the old triple exclude each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FieldFamilies {
    /// `RateLimit` and `RateLimit-Policy`, draft-11 syntax.
    pub ratelimit: bool,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset`.
    pub ratelimit_triple: bool,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Reset` (epoch seconds).
    pub x_ratelimit: bool,
}

/// On which responses the rate-limit fields are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldsOn {
    /// On every response.
    #[default]
    Always,
    /// On rejections only.
    Rejected,
}

/// How the body of our own answers is written.
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
