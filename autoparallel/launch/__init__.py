"""Starting ranks: what each launcher tells a process, the process group and mesh made of it, local ranks."""
