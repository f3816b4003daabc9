//! A gRPC echo service and its client, both from tonic. Messages are plain bytes, so no schema is
//! needed.

use std::{
    convert::Infallible,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    thread,
};

use bytes::{Buf, BufMut};
use http::uri::PathAndQuery;
use tokio::sync::{mpsc, oneshot};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    client,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::{
        BoxFuture, Service,
        tokio_stream::{StreamExt as _, wrappers::ReceiverStream},
    },
    metadata::MetadataMap,
    server,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};

use super::wait::lock;

pub type Message = Vec<u8>;

/// A codec that passes messages through as bytes.
#[derive(Clone, Copy, Default)]
pub struct Bytewise;

impl Codec for Bytewise {
    type Encode = Message;
    type Decode = Message;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Bytewise {
    type Item = Message;
    type Error = Status;

    fn encode(&mut self, message: Message, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put_slice(&message);
        Ok(())
    }
}

impl Decoder for Bytewise {
    type Item = Message;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Message>, Status> {
        let mut message = vec![0; from.remaining()];
        from.copy_to_slice(&mut message);
        Ok(Some(message))
    }
}

/// What the service has received.
#[derive(Default)]
struct Noted {
    metadata: Mutex<Vec<MetadataMap>>,
    hanging: AtomicUsize,
}

/// A running service; stops on drop.
pub struct Echo {
    address: SocketAddr,
    noted: Arc<Noted>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Echo {
    pub fn start() -> Echo {
        Echo::at("127.0.0.1:0".parse().expect("an address"), None)
    }

    /// Allows at most `max` concurrent calls on a connection.
    pub fn with_max_streams(max: u32) -> Echo {
        Echo::at("127.0.0.1:0".parse().expect("an address"), Some(max))
    }

    pub fn at(address: SocketAddr, max_streams: Option<u32>) -> Echo {
        let noted = Arc::new(Noted::default());
        let service = EchoService(Arc::clone(&noted));
        let (stop, stopped) = oneshot::channel::<()>();
        let (bound, is_bound) = std::sync::mpsc::sync_channel(1);
        let thread = thread::spawn(move || {
            super::http2::block_on(async move {
                let incoming = super::wait::eventually("the address of the service", || {
                    TcpIncoming::bind(address).map_err(|error| error.to_string())
                });
                let address = incoming.local_addr().expect("a bound listener");
                bound.send(address).expect("the test waits");
                let serving = Server::builder()
                    .max_concurrent_streams(max_streams)
                    .serve_with_incoming_shutdown(service, incoming, async {
                        let _ = stopped.await;
                    });
                serving.await.expect("the service runs");
            });
        });
        Echo {
            address: is_bound.recv().expect("the service starts"),
            noted,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The value of `servers` in a configuration.
    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }

    /// The metadata of every call so far.
    pub fn calls(&self) -> Vec<MetadataMap> {
        lock(&self.noted.metadata).clone()
    }

    /// The number of calls that hang now.
    pub fn hanging(&self) -> usize {
        self.noted.hanging.load(Ordering::SeqCst)
    }

    /// Sends GOAWAY, lets calls finish, and waits for the end of the service.
    pub fn stop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the service's thread");
        }
    }
}

#[derive(Clone)]
struct EchoService(Arc<Noted>);

impl Service<http::Request<Body>> for EchoService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = Method {
            name: request.uri().path().to_owned(),
            noted: Arc::clone(&self.0),
        };
        let metadata = MetadataMap::from_headers(request.headers().clone());
        lock(&self.0.metadata).push(metadata);
        Box::pin(async move {
            let mut grpc = server::Grpc::new(Bytewise).max_decoding_message_size(64 << 20);
            Ok(match method.name.as_str() {
                "/test.Echo/Unary" | "/test.Echo/Hang" => grpc.unary(method, request).await,
                _ => grpc.streaming(method, request).await,
            })
        })
    }
}

/// One method of the service.
struct Method {
    name: String,
    noted: Arc<Noted>,
}

/// Counts a hanging call until its future is dropped.
struct Hanging(Arc<Noted>);

impl Drop for Hanging {
    fn drop(&mut self) {
        self.0.hanging.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service<Request<Message>> for Method {
    type Response = Response<Message>;
    type Error = Status;
    type Future = BoxFuture<Response<Message>, Status>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    /// Answers with the message. The message `fail` gets NOT_FOUND, and the method `Hang` never
    /// answers.
    fn call(&mut self, request: Request<Message>) -> Self::Future {
        let hangs = self.name.ends_with("Hang");
        let noted = Arc::clone(&self.noted);
        Box::pin(async move {
            if hangs {
                noted.hanging.fetch_add(1, Ordering::SeqCst);
                let _hanging = Hanging(noted);
                std::future::pending::<()>().await;
            }
            if request.get_ref() == b"fail" {
                let mut status = Status::with_details(
                    tonic::Code::NotFound,
                    "nothing at 50% für dich",
                    bytes::Bytes::from_static(b"\x01\x02"),
                );
                status
                    .metadata_mut()
                    .insert("x-why", "because".parse().expect("ASCII"));
                return Err(status);
            }
            let mut response = Response::new(request.into_inner());
            response
                .metadata_mut()
                .insert("x-served-by", "echo".parse().expect("ASCII"));
            Ok(response)
        })
    }
}

type Replies =
    Pin<Box<dyn tonic::codegen::tokio_stream::Stream<Item = Result<Message, Status>> + Send>>;

impl Service<Request<Streaming<Message>>> for Method {
    type Response = Response<Replies>;
    type Error = Status;
    type Future = BoxFuture<Response<Replies>, Status>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    /// `Chat` echoes each message. `Collect` answers once with the number of bytes. The message
    /// `break` ends a chat with ABORTED.
    fn call(&mut self, request: Request<Streaming<Message>>) -> Self::Future {
        let collects = self.name.ends_with("Collect");
        Box::pin(async move {
            let mut messages = request.into_inner();
            if collects {
                let mut total = 0;
                while let Some(message) = messages.message().await? {
                    total += message.len();
                }
                let total = Ok(total.to_string().into_bytes());
                return Ok(Response::new(
                    Box::pin(tonic::codegen::tokio_stream::once(total)) as Replies,
                ));
            }
            let replies = messages.map(|message| match message {
                Ok(message) if message == b"break" => Err(Status::aborted("you said so")),
                message => message,
            });
            Ok(Response::new(Box::pin(replies) as Replies))
        })
    }
}

/// A client that sends every call on one connection.
pub struct Caller {
    grpc: client::Grpc<Channel>,
}

impl Caller {
    pub fn new(address: SocketAddr) -> Caller {
        let endpoint =
            Endpoint::from_shared(format!("http://{address}")).expect("an address is a URL");
        Caller {
            grpc: client::Grpc::new(endpoint.connect_lazy()).max_decoding_message_size(64 << 20),
        }
    }

    async fn ready(&mut self) -> Result<(), Status> {
        let ready = self.grpc.ready().await;
        ready.map_err(|error| Status::unknown(error.to_string()))
    }

    pub async fn unary(
        &mut self,
        method: &'static str,
        request: Request<Message>,
    ) -> Result<Response<Message>, Status> {
        self.ready().await?;
        self.grpc.unary(request, path(method), Bytewise).await
    }

    /// Starts a bidirectional call. Returns the sender of messages, and the response.
    pub async fn streaming(
        &mut self,
        method: &'static str,
    ) -> Result<
        (
            mpsc::Sender<Message>,
            impl Future<Output = Result<Response<Streaming<Message>>, Status>> + '_,
        ),
        Status,
    > {
        self.ready().await?;
        let (send, messages) = mpsc::channel(1);
        let request = Request::new(ReceiverStream::new(messages));
        Ok((send, self.grpc.streaming(request, path(method), Bytewise)))
    }
}

fn path(method: &'static str) -> PathAndQuery {
    PathAndQuery::from_static(method)
}
