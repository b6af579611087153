//! HTTP over one stream, a question at a time, driven by whoever asks.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::stream::Stream;
use crate::limits::ANSWER_BYTES;
use crate::transport::{Answer, Fault};

type Body = Full<Bytes>;
type Speech = http1::Connection<TokioIo<Stream>, Body>;

/// A connection on which nothing is under way.
pub(super) struct Connection {
    sender: SendRequest<Body>,
    /// What writes questions and reads answers, only while it is polled; dropped when it is over, which tells those who wait.
    speech: Option<Speech>,
    socket: Arc<OwnedFd>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failed {
    /// Nothing went out, and this can be sent again.
    Unsent(Box<Request<Body>>, hyper::Error),
    Sent(Fault),
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Connection {
    pub async fn over(stream: Stream) -> io::Result<Self> {
        let socket = stream.socket();
        let (sender, speech) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        Ok(Self { sender, speech: Some(speech), socket })
    }

    /// Whether it can be asked over: the other side may have closed it while nobody watched.
    pub async fn is_open(&mut self) -> bool {
        let Self { sender, speech, socket } = self;
        is_quiet(socket) && driven(speech, async { sender.ready().await.is_ok() }).await
    }

    /// Asks, and reads the whole answer. Whoever drops this half way drops the connection as well.
    pub async fn ask(&mut self, request: Request<Body>) -> Result<Answer, Failed> {
        let Self { sender, speech, .. } = self;
        let asked = async {
            match sender.try_send_request(request).await {
                Ok(response) => read(response).await.map_err(Failed::Sent),
                Err(mut failed) => Err(match failed.take_message() {
                    Some(unsent) => Failed::Unsent(Box::new(unsent), failed.into_error()),
                    None => Failed::Sent(Fault::Broken(failed.into_error().into())),
                }),
            }
        };
        driven(speech, asked).await
    }
}

/// Whether nothing came that nobody asked for, the end least of all.
fn is_quiet(socket: &OwnedFd) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(recv(socket, &mut [0_u8; 1], flags), Err(Errno::WOULDBLOCK | Errno::INTR))
}

/// Polls both: what is asked for moves only where somebody speaks.
async fn driven<T>(speech: &mut Option<Speech>, asked: impl Future<Output = T>) -> T {
    let mut asked = pin!(asked);
    let mut speak = |cx: &mut Context<'_>| {
        // How it ended is told to whoever waits for an answer.
        if speech.as_mut().is_some_and(|speech| Pin::new(speech).poll(cx).is_ready()) {
            *speech = None;
        }
    };
    poll_fn(|cx| {
        // Asked first, what it wants to send goes out at once; asked again, it has what came.
        if let Poll::Ready(done) = asked.as_mut().poll(cx) {
            return Poll::Ready(done);
        }
        speak(cx);
        asked.as_mut().poll(cx)
    })
    .await
}

async fn read(response: Response<Incoming>) -> Result<Answer, Fault> {
    let (head, mut incoming) = response.into_parts();
    let mut body = BytesMut::new();
    while let Some(frame) = incoming.frame().await {
        let Ok(chunk) = frame.map_err(|error| Fault::Broken(error.into()))?.into_data() else { continue };
        if body.len() + chunk.len() > ANSWER_BYTES {
            return Err(Fault::TooLarge(head.status));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer { status: head.status, headers: head.headers, body: body.freeze() })
}
