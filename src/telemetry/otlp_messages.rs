//! The OTLP messages of spans (`opentelemetry-proto` 1.x), with only the fields that tidegate sets.
//!
//! They are declared by hand, so that the build does not need `protoc`. Collectors accept absent
//! fields.

/// `opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest`.
#[derive(prost::Message)]
pub(super) struct ExportTraceServiceRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) resource_spans: Vec<ResourceSpans>,
}

/// `opentelemetry.proto.trace.v1.ResourceSpans`.
#[derive(prost::Message)]
pub(super) struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub(super) resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub(super) scope_spans: Vec<ScopeSpans>,
}

/// `opentelemetry.proto.resource.v1.Resource`.
#[derive(prost::Message)]
pub(super) struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub(super) attributes: Vec<KeyValue>,
}

/// `opentelemetry.proto.trace.v1.ScopeSpans`.
#[derive(prost::Message)]
pub(super) struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub(super) scope: Option<InstrumentationScope>,
    #[prost(message, repeated, tag = "2")]
    pub(super) spans: Vec<Span>,
}

/// `opentelemetry.proto.common.v1.InstrumentationScope`.
#[derive(prost::Message)]
pub(super) struct InstrumentationScope {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

/// `opentelemetry.proto.trace.v1.Span`.
#[derive(prost::Message)]
pub struct Span {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) span_id: Vec<u8>,
    /// Empty for the root of a trace.
    #[prost(bytes = "vec", tag = "4")]
    pub(super) parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub(super) name: String,
    #[prost(enumeration = "SpanKind", tag = "6")]
    pub(super) kind: i32,
    #[prost(fixed64, tag = "7")]
    pub(super) start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    pub(super) end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    pub(super) attributes: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    pub(super) status: Option<SpanStatus>,
}

/// `Span.SpanKind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum SpanKind {
    Unspecified = 0,
    Server = 2,
}

/// `opentelemetry.proto.trace.v1.Status`.
#[derive(prost::Message)]
pub(super) struct SpanStatus {
    #[prost(enumeration = "StatusCode", tag = "3")]
    pub(super) code: i32,
}

/// `Status.StatusCode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(super) enum StatusCode {
    Unset = 0,
    Error = 2,
}

/// `opentelemetry.proto.common.v1.KeyValue`.
#[derive(prost::Message)]
pub(super) struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

/// `opentelemetry.proto.common.v1.AnyValue`.
#[derive(prost::Message)]
struct AnyValue {
    #[prost(oneof = "OtlpValue", tags = "1, 2, 3")]
    value: Option<OtlpValue>,
}

#[derive(prost::Oneof)]
enum OtlpValue {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Boolean(bool),
    #[prost(int64, tag = "3")]
    Number(i64),
}

impl KeyValue {
    /// A text attribute.
    pub(super) fn text(key: &str, value: String) -> KeyValue {
        KeyValue::new(key, OtlpValue::Text(value))
    }

    /// A boolean attribute.
    pub(super) fn boolean(key: &str, value: bool) -> KeyValue {
        KeyValue::new(key, OtlpValue::Boolean(value))
    }

    /// An integer attribute.
    pub(super) fn number(key: &str, value: u64) -> KeyValue {
        KeyValue::new(
            key,
            OtlpValue::Number(i64::try_from(value).unwrap_or(i64::MAX)),
        )
    }

    fn new(key: &str, value: OtlpValue) -> KeyValue {
        KeyValue {
            key: key.to_owned(),
            value: Some(AnyValue { value: Some(value) }),
        }
    }
}
