"""Attacks on the running program, and what withstands them.

Each test attacks `pyrunc` or `pyrunc-cri serve` as somebody would, and looks at what the kernel then shows: mount tables, inotify on a
canary, /proc/PID, the mode of a folder. Races are not left to luck: strace stops the runtime before the calls that are aimed
at, while names are swapped (attack.py). `test_detectors.py` (slow) takes the defences out one by one, and the tests must fail;
`test_matrix.py` keeps this table true. A test of another folder is named with its path.

| class | test | defence |
|---|---|---|
| CVE-2019-5736, runtime overwritten | test_executable.py::test_an_image_that_runs_our_own_executable | what runs inside is a static launcher, never the interpreter |
| | test_executable.py::test_overwriting_through_another_process | it runs from a memfd under all seals |
| | test_server.py::test_an_entrypoint_that_is_ourselves | the same by CRI |
| CVE-2016-9962, newcomers looked into | test_newcomer.py::test_nobody_looks_into_what_waits_for_start | not dumpable from the first operation on |
| | test_newcomer.py::test_nobody_looks_into_what_enters | and again after each change of ids |
| CVE-2024-21626, leaked folders | test_descriptors.py::test_the_working_directory_of_a_container | getcwd must begin with / after the last chdir |
| | test_descriptors.py::test_the_working_directory_of_an_exec | the same; the cgroup's folder is closed at birth |
| | test_descriptors.py::test_the_program_is_not_run_through_a_descriptor | close_range before execve |
| | test_descriptors.py::test_what_waits_for_start_holds_nothing_of_the_host | closed before the wait |
| | test_descriptors.py::test_what_enters_holds_nothing_of_the_host | closed after the clone |
| | test_server.py::test_the_working_directory_of_an_image | the same for WORKDIR |
| CVE-2019-16884, volumes over /proc | test_procfs.py::test_a_volume_over_proc | only a whole procfs goes to /proc |
| | test_procfs.py::test_a_volume_that_a_link_puts_into_proc | fstatfs of each destination: none is procfs |
| | test_server.py::test_an_image_over_proc | the same by CRI |
| CVE-2019-19921, CVE-2023-27561, CVE-2023-28642, CVE-2025-54867 | test_procfs.py::test_a_link_in_place_of_the_directory | openat2 without links for /proc and /sys |
| | test_procfs.py::test_a_link_that_appears_in_time | and the mount is moved to that descriptor |
| CVE-2025-52881, CVE-2025-62596, redirected writes | test_procfs.py::test_sysctls_do_not_pass_through_the_containers_proc | a procfs that nobody else has |
| | test_procfs.py::test_where_sysctls_are_written | BENEATH, NO_SYMLINKS, NO_XDEV |
| | test_procfs.py::test_a_process_that_sees_another_proc | labels, score, clocks: only beneath a whole procfs |
| | test_procfs.py::test_where_a_processs_own_files_are_written | BENEATH, NO_XDEV, before any namespace |
| CVE-2022-0811, smuggled sysctls | test_procfs.py::test_values_that_hold_a_second_setting | one value, one line, one write |
| | test_procfs.py::test_keys_that_are_no_settings_of_a_container | keys by an allow-list and their namespace |
| | test_server.py::test_sysctls_of_a_pod | the same by CRI |
| CVE-2021-30465, swapped destinations | test_mounts.py::test_a_folder_that_is_swapped_while_it_is_mounted_on | RESOLVE_IN_ROOT, descriptors, move_mount |
| CVE-2024-45310, files made on the host | test_mounts.py::test_links_in_destinations | mkdirat and O_EXCL on verified folders |
| | test_mounts.py::test_a_working_directory_that_is_swapped | the same for process.cwd |
| | test_server.py::test_a_missing_source_is_made_where_it_was_looked_up | folder in folder, no link followed |
| CVE-2021-25741 kin, swapped sources | test_mounts.py::test_a_source_by_descriptor_is_not_looked_up_again | /proc/PID/fd/N is opened once |
| | test_mounts.py::test_a_source_that_is_swapped_during_create | looked up once: its real path is opened without following a link |
| | test_mounts.py::test_a_source_that_is_swapped_before_start | mounts are made by create, start opens none of them |
| | test_server.py::test_a_source_that_is_swapped_before_the_start | the same between CreateContainer and StartContainer |
| | tests/cri/test_runtime_handlers.py::test_sources_are_what_they_were | the same for other runtimes: they get a clone that was made at CreateContainer |
| | tests/vm/inside/test_server_checkpoint.py::test_sources_are_what_they_were | and for CRIU |
| | test_command_line.py::test_a_restart_follows_no_link_of_the_container | what the server found must be what it was, else the attempt is removed |
| CVE-2018-15664 kin, cp | test_command_line.py::test_what_became_something_else_is_not_opened | O_PATH and fstat before anything is opened |
| temporary names in folders of others | test_command_line.py::test_a_link_where_an_archive_grows | random names, O_EXCL |
| | test_command_line.py::test_a_link_where_a_plugin_grows | the same |
| copied-up folders | test_mounts.py::test_what_copying_up_meets | O_PATH and fstat before anything is opened |
| mounts that come back | test_mounts.py::test_mounts_of_the_container_do_not_come_back | the tree is a slave, the root detached |
| CVE-2026-41579, CVE-2026-47766, /dev is a link | test_dev.py::test_dev_is_a_link | nodes and links by folder descriptors in the root |
| CVE-2025-31133, CVE-2025-62161, hostile null | test_dev.py::test_null_is_something_else | null must be 1:3, else an error; one descriptor for all masks |
| | test_dev.py::test_null_that_is_swapped | what was checked is what is mounted |
| the host's inodes, changed through a descriptor | test_inodes.py::test_no_process_of_a_pod_holds_a_file_of_the_host | null devices are nodes of our own on a detached tmpfs |
| | test_inodes.py::test_no_process_of_a_bundle_holds_a_file_of_the_host | the same for run, create and exec |
| | test_inodes.py::test_hooks_in_the_container_hold_no_file_of_the_host | and for hooks in its namespaces |
| | test_inodes.py::test_masked_paths_are_not_the_hosts_null_device | masks are the container's own null device |
| CVE-2025-52565, the console | test_dev.py::test_console_is_a_link | no link is followed, TIOCGPTPEER |
| | test_dev.py::test_ptmx_is_something_else | devpts, inode 2, 5:2 |
| CVE-2021-43784, lengths | test_requests.py::test_seventy_thousand_mappings | no such protocol: operations with 64-bit places, checked |
| sync integrity | test_protocol.py::test_only_our_child_is_ours | only an unreaped child of ours is taken |
| | test_protocol.py::test_any_frames_end_in_an_error_and_leak_nothing | fixed frames, unasked descriptors are closed |
| CVE-2022-24769, 27649, 27650, 27652, 29162, CVE-2025-27612 | test_identity.py::test_nothing_is_inheritable | inheritable is what the configuration says, mostly nothing |
| | test_identity.py::test_a_file_with_an_inheritable_capability_gives_none | the effect of it |
| CVE-2026-30892, half-read users | test_identity.py::test_users_are_whole_numbers | ASCII digits, 0 to 2^32 - 2 |
| CVE-2024-40635, CVE-2026-46680 | test_server.py::test_numeric_users_are_never_names | a number is an id, in range, or refused |
| CVE-2026-47262, CVE-2025-4437, hostile accounts | test_server.py::test_hostile_account_files | regular files of at most 1 MiB, opened after fstat |
| | test_identity.py::test_passwd_is_something_else | the same for HOME in pyrunc |
| CVE-2022-2995, CVE-2023-25173, groups | test_identity.py::test_groups_are_the_listed_ones | setgroups always |
| CVE-2022-4318, CVE-2022-1708 kin, HOME | test_server.py::test_home_with_a_second_line | /etc/passwd is never written |
| CVE-2023-25809, the host's groups | test_cgroups.py::test_the_containers_view_of_the_tree | cgroup namespace, read-only |
| CVE-2022-0492, release_agent | test_cgroups.py::test_release_agent | no capability for it, no v1 |
| runc 4103, names of limits | test_cgroups.py::test_file_names_from_limits | no slash |
| crun 1.28, sub-cgroups | test_cgroups.py::test_the_group_of_an_exec | no `..` |
| | test_cgroups.py::test_the_groups_path | normalised below the root |
| delegated trees | test_cgroups.py::test_groups_deeper_than_a_path | walked by descriptors, without recursion |
| the root group | test_cgroups.py::test_the_root_group_is_never_acted_on | refused by each verb of the group |
| device access | test_cgroups.py::test_devices_of_the_host | device filter on the group before the first process |
| CVE-2024-3154, annotations | test_server.py::test_annotations_are_no_orders | they do not reach the specification |
| CVE-2026-53488, labels | test_server.py::test_labels_of_an_image_are_nobodys | nor do an image's labels |
| CVE-2020-15257, sockets | test_server.py::test_no_abstract_sockets | paths only, in folders of mode 0700 |
| CVE-2021-41103, CVE-2024-25621, modes | test_server.py::test_nobody_else_reaches_sockets_and_folders | modes are set at start, also of old folders |
| | test_requests.py::test_modes_of_the_state | 0700, and 0600 for the start socket |
| CVE-2022-23648, CVE-2024-5154, links in images | test_server.py::test_etc_and_mount_points_of_an_image_are_links | resolved in the image's root |
| CVE-2025-0750, paths of logs | test_server.py::test_a_link_where_the_log_goes | O_NOFOLLOW |
| | test_server.py::test_links_on_the_way_to_the_log | the same for each folder from the pod's on |
| | test_server.py::test_log_paths | below the pod's folder |
| | test_server.py::test_names_of_pods_with_path_tricks | paths hold ids of ours only |
| CVE-2022-1708, CVE-2022-31030, endless output | test_server.py::test_endless_output_of_an_exec | a budget below 16 MiB |
| sizes of hostile trees | tests/kernel/kernel/test_usage.py::test_folders_that_become_links | by descriptors, links never followed |
| | tests/kernel/kernel/test_usage.py::test_what_is_too_deep_for_a_path_is_counted | no paths, so none is too long |
| CVE-2020-8557 kin, files that grow | test_server.py::test_the_files_of_a_pod_do_not_fill_the_hosts_run | on disk, never on the state's tmpfs |
| CVE-2022-23471, CVE-2025-64329, streams | tests/cri/streaming/test_hostile.py::test_sessions_cut_at_any_byte | one owner for each stream |
| S-13, tokens | test_server.py::test_tokens_of_streams | 256 bits, once, bound to kind and container |
| CVE-2021-32760, CVE-2025-47290, layers | tests/cri/images/test_hostile.py::test_refused | unpacked beneath one folder by descriptors |
| | tests/cri/images/test_jail.py::test_what_a_taken_over_unpacker_leaves_is_not_trusted | no links where the server opens by name |
| code execution in an inflate library | tests/cri/images/test_jail.py::test_nothing_an_attacker_would_try_works_in_a_decoder | a list of calls that name nothing |
| | tests/cri/images/test_pull.py::test_a_decoder_that_was_taken_over_decides_nothing | another process hashes a copy |
| | tests/cri/images/test_pull.py::test_a_decoder_that_was_taken_over_holds_nobody_up | it is killed when the content is here |
| | tests/unit/images/test_ring.py::test_a_sender_that_lies_is_heard_within_the_blocks | nothing beyond the blocks is read |
| S-01 | tests/cri/images/test_hostile_random.py::test_any_sequence_of_members | the same, random archives |
| GHSA-5j5w-g665-5m35, ambiguous manifests | tests/cri/images/test_faults.py::test_a_wrong_manifest | refused |
| CVE-2021-20206, plugin types | tests/unit/cni/test_protocol.py::test_a_list_that_makes_no_sense | bare names |
| CVE-2020-10749, router advertisements | tests/kernel/cni/test_bridge.py::test_forwarding_is_switched_on_for_a_gateway_only | accept_ra = 0 |
| CVE-2026-53489, links in checkpoints | test_checkpoints.py::test_images_that_are_no_files | regular files only, before CRIU sees them |
| | test_checkpoints.py::test_a_dump_does_not_write_through_links | the same before a dump |
| | test_checkpoints.py::test_masked_paths_are_looked_up_in_the_container | resolved in the container's root |
| torn checkpoints | test_checkpoints.py::test_torn_dumps | checked before anything is made |
| | test_checkpoints.py::test_what_criu_itself_refuses | all is undone |
| | test_checkpoints.py::test_names_of_streams_are_what_proc_says | one form, by numbers |
| seccomp, other tables | test_calls.py::test_other_tables_are_no_way_around_a_filter | architectures are checked, x32 by its bit |
| TIOCSTI | test_calls.py::test_typing_into_the_callers_terminal | a session of its own |
| keyrings | test_calls.py::test_keys_of_the_caller | a session keyring of its own |
| S-21, a tight container | test_calls.py::test_what_a_tight_container_may_try | default profile, masks, no new privileges |
| section 0.5, code of the image | test_python.py::test_nothing_of_the_image_is_loaded | no interpreter after the border |
| | test_executable.py::test_no_interpreter_and_no_file_of_ours_after_the_border | by the kernel's log of calls |
| section 0.1, joined paths | test_python.py::test_no_paths_are_joined_beneath_a_root | by the syntax trees |
| section 10.2, lenient Python | test_requests.py::test_values_of_the_wrong_kind | strict types |
| section 10.8, pids used again | test_requests.py::test_a_state_folder_that_was_tampered_with | start time beside the pid, pidfd |
| section 10.9, escape sequences | test_calls.py::test_terminal_text_of_a_container_in_our_errors | escaped |
| | test_calls.py::test_terminal_text_of_a_container_in_our_tables | the same in pyrunc-cri |
| section 10.10, sizes | test_requests.py::test_files_of_the_bundle_and_options | errors in bounded memory |

Not attacked here: labels of AppArmor and SELinux (tests/vm), the content of CRIU's images (who may write them has
the rights that it restores with), rootless callers.
"""
