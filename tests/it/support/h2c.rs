//! A scriptable cleartext HTTP/2 origin on its own thread. It runs the script once per stream.

use std::{
    future::Future,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use bytes::Bytes;
use h2::{RecvStream, SendStream, server::SendResponse};
use http::{Request, Response, request::Parts};
use tokio::{net::TcpListener, sync::oneshot};

use super::wait::{eventually, lock};

#[derive(Default)]
struct Shared {
    seen: Mutex<Vec<Parts>>,
    connections: AtomicUsize,
    /// Number of streams that the gateway reset.
    reset: AtomicUsize,
}

/// A running origin; its connections end on drop.
pub struct H2cOrigin {
    address: SocketAddr,
    shared: Arc<Shared>,
    _stop: oneshot::Sender<()>,
}

/// One request, and the stream for its response.
pub struct Call {
    pub number: usize,
    pub body: RecvStream,
    pub respond: SendResponse<Bytes>,
    shared: Arc<Shared>,
}

impl H2cOrigin {
    /// Runs `script` for every request, each in its own task.
    pub fn new<F>(script: impl Fn(Call) -> F + Send + 'static) -> H2cOrigin
    where
        F: Future<Output = ()> + 'static,
    {
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = oneshot::channel::<()>();
        let (bound, is_bound) = std::sync::mpsc::sync_channel(1);
        let recorded = Arc::clone(&shared);
        thread::spawn(move || {
            let local = tokio::task::LocalSet::new();
            let serving = async move {
                let listener = TcpListener::bind("127.0.0.1:0").await;
                let listener = listener.expect("a free port on loopback");
                let address = listener.local_addr().expect("a bound listener");
                bound.send(address).expect("the test waits");
                let script = std::rc::Rc::new(script);
                loop {
                    let Ok((stream, _)) = listener.accept().await else {
                        continue;
                    };
                    recorded.connections.fetch_add(1, Ordering::SeqCst);
                    let (script, recorded) = (std::rc::Rc::clone(&script), Arc::clone(&recorded));
                    tokio::task::spawn_local(async move {
                        let Ok(mut connection) = h2::server::handshake(stream).await else {
                            return;
                        };
                        while let Some(Ok((request, respond))) = connection.accept().await {
                            tokio::task::spawn_local(script(Call::note(
                                request, respond, &recorded,
                            )));
                        }
                    });
                }
            };
            super::http2::block_on(local.run_until(async {
                tokio::select! {
                    () = serving => {}
                    _ = stopped => {}
                }
            }));
        });
        H2cOrigin {
            address: is_bound.recv().expect("the origin starts"),
            shared,
            _stop: stop,
        }
    }

    /// Answers 200 with the request's body.
    pub fn echo() -> H2cOrigin {
        H2cOrigin::new(|mut call| async move {
            let mut send = call.answer(Response::new(()), false);
            while let Some(Ok(data)) = call.body.data().await {
                let _ = call.body.flow_control().release_capacity(data.len());
                if send_all(&mut send, data).await.is_err() {
                    return;
                }
            }
            let _ = match call.body.trailers().await {
                Ok(Some(trailers)) => send.send_trailers(trailers),
                _ => send.send_data(Bytes::new(), true),
            };
        })
    }

    /// The value of `servers` in a configuration.
    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }

    /// Every request head so far.
    pub fn requests(&self) -> Vec<Parts> {
        lock(&self.shared.seen).clone()
    }

    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Waits until the gateway has reset `count` streams. Scripts report them with
    /// [`Call::wait_for_reset`].
    pub fn wait_for_resets(&self, count: usize) {
        eventually("streams reset by the gateway", || {
            match self.shared.reset.load(Ordering::SeqCst) {
                seen if seen >= count => Ok(()),
                seen => Err(seen.to_string()),
            }
        });
    }
}

impl Call {
    fn note(
        request: Request<RecvStream>,
        respond: SendResponse<Bytes>,
        shared: &Arc<Shared>,
    ) -> Call {
        let (head, body) = request.into_parts();
        let mut seen = lock(&shared.seen);
        seen.push(head);
        Call {
            number: seen.len(),
            body,
            respond,
            shared: Arc::clone(shared),
        }
    }

    /// The path and query of the request.
    pub fn target(&self) -> String {
        lock(&self.shared.seen)[self.number - 1]
            .uri
            .path()
            .to_owned()
    }

    /// Counts a reset by the gateway.
    pub fn note_reset(&self, reset: bool) {
        self.shared
            .reset
            .fetch_add(usize::from(reset), Ordering::SeqCst);
    }

    pub fn answer(&mut self, head: Response<()>, ends: bool) -> SendStream<Bytes> {
        self.respond
            .send_response(head, ends)
            .expect("the stream is open")
    }

    /// Waits until the gateway resets the stream.
    pub async fn wait_for_reset(&self, mut send: SendStream<Bytes>) {
        let reset = std::future::poll_fn(|cx| send.poll_reset(cx)).await;
        self.note_reset(reset.is_ok());
    }
}

/// Sends data as flow control permits.
pub async fn send_all(send: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        send.reserve_capacity(data.len());
        while send.capacity() == 0 {
            match std::future::poll_fn(|cx| send.poll_capacity(cx)).await {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(h2::Reason::CANCEL.into()),
            }
        }
        let room = send.capacity().min(data.len());
        send.send_data(data.split_to(room), false)?;
    }
    Ok(())
}
