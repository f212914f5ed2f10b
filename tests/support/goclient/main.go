// A client of streaming URLs made of Kubernetes' own parts, for the tests of our server:
//
//	goclient exec    -url URL -protocol NAME [-websocket] [-stdin] [-stdout] [-stderr] [-tty] [-sizes 80x24,100x40]
//	goclient forward -url URL -ports 0:8080,0:9090 [-tunnel]
//
// exec joins the session to its own stdio and exits with the command's exit code; any other failure is exit code 250 and
// a line on stderr. forward prints the local ports in the order of -ports, one line, and runs until its stdin ends.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	utilexec "k8s.io/client-go/util/exec"
)

const failed = 250

func main() {
	if len(os.Args) < 2 {
		fail(errors.New("exec or forward"))
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	address := flags.String("url", "", "streaming URL")
	protocol := flags.String("protocol", "v4.channel.k8s.io", "stream protocol of exec")
	websocket := flags.Bool("websocket", false, "WebSocket instead of SPDY")
	stdin := flags.Bool("stdin", false, "send stdin")
	stdout := flags.Bool("stdout", false, "receive stdout")
	stderr := flags.Bool("stderr", false, "receive stderr")
	tty := flags.Bool("tty", false, "the session has a terminal")
	sizes := flags.String("sizes", "", "terminal sizes, sent one after the other")
	ports := flags.String("ports", "", "LOCAL:REMOTE, separated by commas")
	tunnel := flags.Bool("tunnel", false, "SPDY inside of a WebSocket")
	if err := flags.Parse(os.Args[2:]); err != nil {
		fail(err)
	}
	target, err := url.Parse(*address)
	if err != nil {
		fail(err)
	}
	switch os.Args[1] {
	case "exec":
		options := remotecommand.StreamOptions{Tty: *tty}
		if *stdin {
			options.Stdin = os.Stdin
		}
		if *stdout {
			options.Stdout = os.Stdout
		}
		if *stderr {
			options.Stderr = os.Stderr
		}
		if *sizes != "" {
			options.TerminalSizeQueue = newQueue(*sizes)
		}
		execute(target, *protocol, *websocket, options)
	case "forward":
		forward(target, strings.Split(*ports, ","), *tunnel)
	default:
		fail(fmt.Errorf("unknown command %q", os.Args[1]))
	}
}

func execute(target *url.URL, protocol string, websocket bool, options remotecommand.StreamOptions) {
	config := &rest.Config{Host: target.Host}
	var executor remotecommand.Executor
	var err error
	if websocket {
		executor, err = remotecommand.NewWebSocketExecutorForProtocols(config, "GET", target.String(), protocol)
	} else {
		var transport http.RoundTripper
		var upgrader spdy.Upgrader
		if transport, upgrader, err = spdy.RoundTripperFor(config); err == nil {
			executor, err = remotecommand.NewSPDYExecutorForProtocols(transport, upgrader, "POST", target, protocol)
		}
	}
	if err != nil {
		fail(err)
	}
	err = executor.StreamWithContext(context.Background(), options)
	var exited utilexec.CodeExitError
	if errors.As(err, &exited) {
		os.Exit(exited.Code)
	}
	if err != nil {
		fail(err)
	}
}

func forward(target *url.URL, ports []string, tunnel bool) {
	config := &rest.Config{Host: target.Host}
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		fail(err)
	}
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, "POST", target)
	if tunnel {
		if dialer, err = portforward.NewSPDYOverWebsocketDialer(target, config); err != nil {
			fail(err)
		}
	}
	stop, ready := make(chan struct{}), make(chan struct{})
	forwarder, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, ports, stop, ready, io.Discard, os.Stderr)
	if err != nil {
		fail(err)
	}
	go func() {
		<-ready
		taken, err := forwarder.GetPorts()
		if err != nil {
			fail(err)
		}
		numbers := []string{}
		for _, port := range taken {
			numbers = append(numbers, fmt.Sprint(port.Local))
		}
		fmt.Println(strings.Join(numbers, " "))
		io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	if err := forwarder.ForwardPorts(); err != nil {
		fail(err)
	}
}

// queue gives each size once, then blocks as a terminal without further resizes.
type queue struct{ sizes []remotecommand.TerminalSize }

func newQueue(text string) *queue {
	q := &queue{}
	for _, part := range strings.Split(text, ",") {
		var size remotecommand.TerminalSize
		if _, err := fmt.Sscanf(part, "%dx%d", &size.Width, &size.Height); err != nil {
			fail(err)
		}
		q.sizes = append(q.sizes, size)
	}
	return q
}

func (q *queue) Next() *remotecommand.TerminalSize {
	if len(q.sizes) == 0 {
		select {}
	}
	size := q.sizes[0]
	q.sizes = q.sizes[1:]
	return &size
}

func fail(err error) {
	fmt.Fprintf(os.Stderr, "goclient: %v\n", err)
	os.Exit(failed)
}
