//! A trace collector: OTLP over gRPC on its own thread, which decodes spans with independent
//! message types.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use prost::Message;

use super::{
    h2c::{Call, H2cOrigin},
    wait::{eventually, lock},
};

/// `opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest` and the messages in it, with
/// only the fields that tests read.
#[derive(Clone, PartialEq, Message)]
struct Export {
    #[prost(message, repeated, tag = "1")]
    resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeSpans {
    #[prost(message, repeated, tag = "2")]
    spans: Vec<RawSpan>,
}

#[derive(Clone, PartialEq, Message)]
struct RawSpan {
    #[prost(bytes = "vec", tag = "1")]
    trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    span_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
    #[prost(int32, tag = "6")]
    kind: i32,
    #[prost(fixed64, tag = "7")]
    start: u64,
    #[prost(fixed64, tag = "8")]
    end: u64,
    #[prost(message, repeated, tag = "9")]
    attributes: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    status: Option<Status>,
}

#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "3")]
    code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    #[prost(oneof = "OneOf", tags = "1, 2, 3")]
    value: Option<OneOf>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum OneOf {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Boolean(bool),
    #[prost(int64, tag = "3")]
    Number(i64),
}

/// A received span. IDs are hexadecimal, attributes are text.
#[derive(Clone, Debug)]
pub struct Span {
    pub trace: String,
    pub id: String,
    /// Empty for the root of a trace.
    pub parent: String,
    pub name: String,
    pub kind: i32,
    pub start_ns: u64,
    pub end_ns: u64,
    /// 2 means error.
    pub status: i32,
    pub attributes: BTreeMap<String, String>,
    /// The `service.name` of its resource.
    pub service: String,
}

/// A running collector; stops on drop.
pub struct Collector {
    origin: H2cOrigin,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    /// Starts a collector that accepts everything.
    pub fn start() -> Collector {
        let spans = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&spans);
        let origin = H2cOrigin::new(move |call| take(call, Arc::clone(&kept)));
        Collector { origin, spans }
    }

    /// Starts a collector that accepts calls but never answers.
    pub fn hanging() -> Collector {
        let origin = H2cOrigin::new(|call: Call| async move {
            let _kept = call;
            std::future::pending::<()>().await;
        });
        Collector {
            origin,
            spans: Arc::default(),
        }
    }

    /// The value of `otlp_endpoint`.
    pub fn url(&self) -> String {
        self.origin.url().replace("h2c://", "http://")
    }

    /// Waits for `count` spans and returns all received ones.
    pub fn wait_for(&self, count: usize) -> Vec<Span> {
        eventually("spans", || match lock(&self.spans).clone() {
            spans if spans.len() >= count => Ok(spans),
            spans => Err(format!("{} of {count}", spans.len())),
        })
    }
}

async fn take(mut call: Call, spans: Arc<Mutex<Vec<Span>>>) {
    let mut body = Vec::new();
    while let Some(Ok(data)) = call.body.data().await {
        let _ = call.body.flow_control().release_capacity(data.len());
        body.extend_from_slice(&data);
    }
    assert_eq!(
        call.target(),
        "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
    );
    let (frame, message) = body.split_at(5);
    assert_eq!(frame[0], 0, "not compressed");
    assert_eq!(
        frame[1..],
        u32::try_from(message.len()).expect("small").to_be_bytes()
    );
    let export = Export::decode(message).expect("it is an ExportTraceServiceRequest");
    lock(&spans).extend(read(export));
    let head = Response::builder().header("content-type", "application/grpc");
    let mut send = call.answer(head.body(()).expect("a head"), false);
    let _ = send.send_data(Bytes::from_static(&[0, 0, 0, 0, 0]), false);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let _ = send.send_trailers(trailers);
}

fn read(export: Export) -> Vec<Span> {
    let of_resource = |of: ResourceSpans| {
        let resource = of.resource.map(|resource| texts(resource.attributes));
        let service = resource.and_then(|mut of| of.remove("service.name"));
        let service = service.unwrap_or_default();
        let spans = of.scope_spans.into_iter().flat_map(|scope| scope.spans);
        spans
            .map(|span| Span {
                trace: hexadecimal(&span.trace_id),
                id: hexadecimal(&span.span_id),
                parent: hexadecimal(&span.parent_span_id),
                name: span.name,
                kind: span.kind,
                start_ns: span.start,
                end_ns: span.end,
                status: span.status.map_or(0, |status| status.code),
                attributes: texts(span.attributes),
                service: service.clone(),
            })
            .collect::<Vec<_>>()
    };
    export
        .resource_spans
        .into_iter()
        .flat_map(of_resource)
        .collect()
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value: Option<AnyValue>| match value.and_then(|any| any.value) {
        Some(OneOf::Text(text)) => text,
        Some(OneOf::Boolean(yes)) => yes.to_string(),
        Some(OneOf::Number(number)) => number.to_string(),
        None => panic!("an attribute without a value"),
    };
    let pairs = attributes.into_iter();
    pairs.map(|pair| (pair.key, text(pair.value))).collect()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
