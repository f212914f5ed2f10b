// An NRI plugin on the Go module's own stub: it prints a line for each event and does what a pod's annotations ask for.
//
//	test/device: PATH      the container gets the host's device of this path
//	test/nofile: NUMBER    its limit of open files
//	test/env:    NAME=TEXT a variable
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

type plugin struct{}

func say(event string, pod *api.PodSandbox, container *api.Container) {
	fmt.Println(event, pod.GetName(), container.GetName())
}

func (plugin) Configure(_ context.Context, config, runtime, version string) (stub.EventMask, error) {
	fmt.Println("Configure", runtime, config)
	return 0, nil
}

func (plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	fmt.Println("Synchronize", len(pods), len(containers))
	return nil, nil
}

func (plugin) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	say("RunPodSandbox", pod, nil)
	return nil
}

func (plugin) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	say("StopPodSandbox", pod, nil)
	return nil
}

func (plugin) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	say("RemovePodSandbox", pod, nil)
	return nil
}

func (plugin) UpdatePodSandbox(_ context.Context, pod *api.PodSandbox, _, _ *api.LinuxResources) error {
	say("UpdatePodSandbox", pod, nil)
	return nil
}

func (plugin) PostUpdatePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	say("PostUpdatePodSandbox", pod, nil)
	return nil
}

func (plugin) CreateContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	say("CreateContainer", pod, container)
	adjustment := &api.ContainerAdjustment{}
	if path := pod.GetAnnotations()["test/device"]; path != "" {
		var facts syscall.Stat_t
		if err := syscall.Stat(path, &facts); err != nil {
			return nil, nil, fmt.Errorf("stat %s: %w", path, err)
		}
		adjustment.AddDevice(&api.LinuxDevice{
			Path: path, Type: "c", Major: int64(facts.Rdev >> 8 & 0xfff), Minor: int64(facts.Rdev & 0xff),
		})
	}
	if text := pod.GetAnnotations()["test/nofile"]; text != "" {
		number, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return nil, nil, err
		}
		adjustment.AddRlimit("RLIMIT_NOFILE", number, number)
	}
	if name, text, found := strings.Cut(pod.GetAnnotations()["test/env"], "="); found {
		adjustment.AddEnv(name, text)
	}
	return adjustment, nil, nil
}

func (plugin) PostCreateContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) error {
	say("PostCreateContainer", pod, container)
	return nil
}

func (plugin) StartContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) error {
	say("StartContainer", pod, container)
	return nil
}

func (plugin) PostStartContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) error {
	say("PostStartContainer", pod, container)
	return nil
}

func (plugin) UpdateContainer(_ context.Context, pod *api.PodSandbox, container *api.Container, wanted *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	say("UpdateContainer", pod, container)
	update := &api.ContainerUpdate{}
	update.SetContainerId(container.GetId())
	update.SetLinuxCPUShares(wanted.GetCpu().GetShares().GetValue() + 1)
	return []*api.ContainerUpdate{update}, nil
}

func (plugin) PostUpdateContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) error {
	say("PostUpdateContainer", pod, container)
	return nil
}

func (plugin) StopContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) ([]*api.ContainerUpdate, error) {
	say("StopContainer", pod, container)
	return nil, nil
}

func (plugin) RemoveContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) error {
	say("RemoveContainer", pod, container)
	return nil
}

func main() {
	socket := flag.String("socket", "", "where the runtime listens; empty: the one that it has given")
	name := flag.String("name", "", "the plugin's name")
	index := flag.String("index", "", "its index")
	flag.Parse()
	options := []stub.Option{}
	if *socket != "" {
		options = append(options, stub.WithSocketPath(*socket), stub.WithPluginName(*name), stub.WithPluginIdx(*index))
	} else {
		// Started by the runtime, which does not read its output.
		file, err := os.Create(os.Args[0] + ".out")
		if err == nil {
			err = syscall.Dup2(int(file.Fd()), 1)
		}
		if err != nil {
			panic(err)
		}
	}
	made, err := stub.New(plugin{}, options...)
	if err == nil {
		err = made.Run(context.Background())
	}
	fmt.Println("ended", err)
}
