use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use http::Method;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::yield_now;

use super::*;
use crate::watch::{Ready, Watch, watched_by};

fn question(route: &str, query: &[(&'static str, &str)]) -> Question {
    Question {
        method: Method::GET,
        route: route.into(),
        query: query.iter().map(|(name, value)| (*name, (*value).into())).collect(),
        headers: HeaderMap::new(),
        body: None,
        timeout: Duration::from_secs(20),
    }
}

fn wire(address: &str) -> Wire {
    Wire::to(&address.parse().unwrap(), HeaderMap::new(), Duration::from_secs(5)).unwrap()
}

#[test]
fn only_what_is_on_this_machine_and_not_encrypted_is_reached_so() {
    for (address, is_reached) in [
        ("http://127.0.0.1:8000", true),
        ("http://[::1]:8000/gpus/", true),
        ("http://localhost", true),
        ("unix:/run/gpupool/socket", true),
        ("https://127.0.0.1:8000", false),
        ("http://gpu7:8000", false),
    ] {
        let wire = Wire::to(&address.parse().unwrap(), HeaderMap::new(), Duration::ZERO);
        assert_eq!(wire.is_some(), is_reached, "{address}");
    }
}

#[test]
fn routes_come_after_the_path_of_the_address_and_odd_letters_are_escaped() {
    let wire = wire("http://[::1]:8000/gpus/");
    assert_eq!(wire.headers[HOST], "[::1]:8000");
    for (route, query, target) in [
        ("/v1/leases/7", &[][..], "/gpus/v1/leases/7"),
        ("/v1/tokens/a b?c", &[], "/gpus/v1/tokens/a%20b%3Fc"),
        ("/v1/pool", &[("owner", "a&b=ü"), ("limit", "3")], "/gpus/v1/pool?owner=a%26b%3D%C3%BC&limit=3"),
    ] {
        assert_eq!(wire.target(&question(route, query)).unwrap(), target);
    }
}

/// Answers so many questions on one connection, then closes it.
async fn answer(listener: &TcpListener, questions: usize) {
    let (mut stream, _) = listener.accept().await.unwrap();
    for _ in 0..questions {
        answer_one(&mut stream).await;
    }
}

async fn answer_one(stream: &mut TcpStream) {
    let mut heard = Vec::new();
    while !heard.ends_with(b"\r\n\r\n") {
        assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0, "the client closed it");
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
}

#[tokio::test]
async fn a_connection_is_used_again_until_it_is_closed_and_then_another_is_made() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let wire = wire(&format!("http://{}", listener.local_addr().unwrap()));
    let (closes, closed) = oneshot::channel();
    let asks = async {
        for timeout in [Duration::from_secs(20), Duration::MAX] {
            let asked = wire.ask(Question { timeout, ..question("/", &[]) }).await;
            assert_eq!(asked.unwrap().body, "{}");
        }
        closed.await.unwrap();
        assert_eq!(wire.ask(question("/", &[])).await.unwrap().status, 200);
    };
    let answers = async {
        answer(&listener, 2).await;
        closes.send(()).unwrap();
        answer(&listener, 1).await;
    };
    tokio::join!(asks, answers);
}

/// Watches by hand: knows the socket it was last asked to wait for, until the test says that something came.
#[derive(Debug, Default)]
struct ByHand {
    waited_for: Mutex<Option<(i32, OwnedFd)>>,
    forgotten: AtomicUsize,
}

impl Watch for ByHand {
    fn watch(&self, socket: BorrowedFd<'_>, ready: Ready, _: &Waker) -> io::Result<()> {
        assert_eq!(ready, Ready::Read, "so little can always be written");
        *self.waited_for.lock().unwrap() = Some((socket.as_raw_fd(), socket.try_clone_to_owned()?));
        Ok(())
    }

    fn still_waits(&self, socket: BorrowedFd<'_>, ready: Ready, _: &Waker) -> bool {
        ready == Ready::Read
            && self.waited_for.lock().unwrap().as_ref().is_some_and(|(known, _)| *known == socket.as_raw_fd())
    }

    fn forget(&self, _: BorrowedFd<'_>) {
        *self.waited_for.lock().unwrap() = None;
        self.forgotten.fetch_add(1, Ordering::SeqCst);
    }
}

/// Whether somebody was woken.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl ByHand {
    /// Polls a question whose socket this one watches, for as long as it wakes itself.
    fn poll<F: Future>(self: &Arc<Self>, mut asked: Pin<&mut F>) -> Poll<F::Output> {
        loop {
            let woken = Arc::new(Woken::default());
            let waker = Waker::from(woken.clone());
            let polled = watched_by(self.clone(), || asked.as_mut().poll(&mut Context::from_waker(&waker)));
            if polled.is_ready() || !woken.0.load(Ordering::SeqCst) {
                return polled;
            }
        }
    }

    /// Lets others go on until there is something to read.
    async fn comes(&self) {
        while !self.waited_for.lock().unwrap().as_ref().is_some_and(|(_, socket)| is_readable(socket)) {
            yield_now().await;
        }
    }

    /// Says that it has come.
    fn has_come(&self) {
        assert!(self.waited_for.lock().unwrap().take().is_some());
    }
}

fn is_readable(socket: &OwnedFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&at_once)).unwrap() == 1
}

/// A wire with one connection, on which a server answers whatever is asked.
async fn served() -> Wire {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let wire = wire(&format!("http://{}", listener.local_addr().unwrap()));
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        loop {
            answer_one(&mut stream).await;
        }
    });
    assert_eq!(wire.ask(question("/", &[])).await.unwrap().body, "{}");
    wire
}

#[tokio::test]
async fn a_question_is_watched_by_whoever_polls_it() {
    let (wire, watch) = (served().await, Arc::new(ByHand::default()));
    for _ in 0..2 {
        let mut asked = pin!(wire.ask(question("/", &[])));
        assert!(watch.poll(asked.as_mut()).is_pending());
        watch.comes().await;
        assert!(watch.poll(asked.as_mut()).is_pending(), "nobody said that anything came");
        watch.has_come();
        let Poll::Ready(answer) = watch.poll(asked.as_mut()) else { panic!("the answer has come") };
        assert_eq!(answer.unwrap().body, "{}");
    }
    assert_eq!((wire.idle.lock().unwrap().len(), watch.forgotten.load(Ordering::SeqCst)), (1, 0));
    drop(wire);
    assert_eq!(watch.forgotten.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_question_can_be_handed_to_the_runtime_half_way_and_back() {
    let (wire, watch) = (served().await, Arc::new(ByHand::default()));
    let mut asked = Box::pin(wire.ask(question("/", &[])));
    assert!(watch.poll(asked.as_mut()).is_pending());
    assert_eq!(asked.await.unwrap().body, "{}");
    assert_eq!(watch.forgotten.load(Ordering::SeqCst), 1, "two who watch would wake two");

    let mut asked = Box::pin(wire.ask(question("/", &[])));
    assert!(asked.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    // It looks for itself before it waits, and may find the answer.
    let mut answer = watch.poll(asked.as_mut());
    if answer.is_pending() {
        watch.comes().await;
        watch.has_come();
        answer = watch.poll(asked.as_mut());
    }
    assert!(matches!(answer, Poll::Ready(Ok(_))), "{answer:?}");
    assert_eq!(wire.idle.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_connection_that_was_closed_while_nobody_watched_is_not_asked_over() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (wire, watch) = (wire(&format!("http://{}", listener.local_addr().unwrap())), Arc::new(ByHand::default()));
    let (asked, ()) = tokio::join!(wire.ask(question("/", &[])), answer(&listener, 1));
    assert_eq!(asked.unwrap().status, 200);
    let mut asked = Box::pin(wire.ask(question("/", &[])));
    assert!(watch.poll(asked.as_mut()).is_pending());
    let (asked, ()) = tokio::join!(asked, answer(&listener, 1));
    assert_eq!(asked.unwrap().status, 200, "over a new connection");
}

#[tokio::test]
async fn a_fault_says_whether_the_question_can_have_arrived() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let wire = wire(&format!("http://{}", listener.local_addr().unwrap()));
    let hung_up = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_exact(&mut [0; 1]).await.unwrap();
    };
    let (asked, ()) = tokio::join!(wire.ask(question("/", &[])), hung_up);
    assert!(matches!(asked, Err(Fault::Broken(_))), "{asked:?}");
    let asked = wire.ask(Question { timeout: Duration::from_millis(50), ..question("/", &[]) }).await;
    assert!(matches!(asked, Err(Fault::Late)), "{asked:?}");
    drop(listener);
    let asked = wire.ask(question("/", &[])).await;
    assert!(matches!(asked, Err(Fault::NotSent(_))), "{asked:?}");
}
